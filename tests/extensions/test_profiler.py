import pytest

from tekoa.extensions.profiler import ProfilerTrace, StepTrace


def test_a_profile_covers_the_chosen_steps_and_is_recorded_once(tmp_path, summary):
    stage = ProfilerTrace(tmp_path, start_step=2, n_steps=2)
    for step in range(1, 8):
        checkpoint = summary(step)
        assert stage(checkpoint) is checkpoint
        assert len(list(tmp_path.rglob("*.xplane.pb"))) == (1 if step >= 4 else 0)


def test_close_ends_a_recording(tmp_path, summary):
    stage = ProfilerTrace(output_dir=tmp_path, start_step=1, n_steps=100)
    stage(summary(1))
    stage.close()
    stage.close()
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1


def test_at_least_one_step_is_required(tmp_path):
    with pytest.raises(ValueError, match="n_steps must be 1 or more"):
        ProfilerTrace(tmp_path, start_step=0, n_steps=0)


def test_a_hook_records_steps_between_checkpoints(tmp_path):
    trace = StepTrace(tmp_path, first_step=3, n_steps=2)
    for n_done in range(6):
        trace(n_done)
        assert len(list(tmp_path.rglob("*.xplane.pb"))) == (1 if n_done >= 4 else 0)
    trace.close()
    with pytest.raises(ValueError, match="1 or more"):
        StepTrace(tmp_path, first_step=0, n_steps=1)
