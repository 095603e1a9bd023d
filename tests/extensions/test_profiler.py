import pytest

from tekoa.extensions.profiler import ProfilerTrace, StepTrace
from tekoa.store.signals import StopFlag


def test_a_trace_covers_the_chosen_steps_and_is_recorded_once(tmp_path, summary):
    stage = ProfilerTrace(tmp_path, start_step=2, n_steps=2)
    for step in range(1, 8):
        given = summary(step)
        assert stage(given) is given
        found = list(tmp_path.rglob("*.xplane.pb"))
        assert len(found) == (1 if step >= 4 else 0)


def test_closing_ends_a_trace(tmp_path, summary):
    stage = ProfilerTrace(tmp_path, start_step=1, n_steps=100)
    stage(summary(1))
    stage.close()
    stage.close()
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1


def test_no_steps_are_no_trace(tmp_path):
    with pytest.raises(ValueError, match="n_steps must be 1 or more"):
        ProfilerTrace(tmp_path, start_step=0, n_steps=0)


def test_a_flag_traces_steps_between_checkpoints(tmp_path):
    trace = StepTrace(tmp_path, first_step=3, n_steps=2, stop_flag=StopFlag())
    assert not trace.is_set()
    for n_done in range(6):
        trace.step = lambda n_done=n_done: n_done
        assert not trace.is_set()
        assert len(list(tmp_path.rglob("*.xplane.pb"))) == (1 if n_done >= 4 else 0)
    trace.close()
    with pytest.raises(ValueError, match="1 or more"):
        StepTrace(tmp_path, first_step=0, n_steps=1, stop_flag=StopFlag())
