import functools
import os
import signal

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import tekoa
from tekoa.estimator.replay import replay
from tekoa.estimator.replay.segment import OtherDataError, Replayer, ReplayError
from tekoa.testing import count_compilations


def contents(directory):
    return {p: p.stat().st_mtime_ns for p in [directory, *directory.rglob("*")]}


def test_every_segment_of_a_run_has_the_bits_of_its_checkpoints(trained):
    before = contents(trained)
    replayer = Replayer(trained)
    stops = [10, 20, 30, 40]
    for checkpoint in replayer.states(0, stops):
        assert replay.difference_from_stored(replayer, checkpoint) is None
    assert replay.difference_from_stored(replayer, replayer.run(20, 30)) is None
    assert contents(trained) == before


def test_all_segments_run_on_the_programs_of_the_first(trained):
    replayer = Replayer(trained)
    replayer.run(10, 20)
    with count_compilations() as compiled:
        replayer.run(30, 40)
        replayer.run(0, 10)
    assert compiled.total == 0


def test_a_step_in_between_is_on_the_way_to_the_next_checkpoint(trained):
    replayer = Replayer(trained)
    checkpoints = [*replayer.states(10, [13, 20])]
    assert [c.step for c in checkpoints] == [13, 20]
    assert replayer.loop_at(13).step == 13
    with pytest.raises(ReplayError, match="step 13 is not stored"):
        replayer.run(13, 20)


@pytest.mark.slow
def test_settings_that_changed_at_a_resume_are_replayed_too(train, tmp_path):
    directory = tmp_path / "run"
    assert train(directory, "--max_train_steps=15", "--check_every_steps=5") == 0
    assert train(directory, "--check_every_steps=5", "--module_config.rate=0.1") == 0
    replayer = Replayer(directory)
    # The step of the change is removed: the segment crosses it.
    replayer.stored = {n: replayer.stored[n] for n in (10, 25)}
    assert replay.difference_from_stored(replayer, replayer.run(10, 25)) is None


def test_a_stop_between_checkpoints_is_replayed_to_the_bit(train, tmp_path, trained):
    directory = tmp_path / "run"

    class Stop:
        """Stops the run after a few batches, as a signal would."""

        n_left = 14

    def count(self, *args, **kwargs):
        Stop.n_left -= 1
        if not Stop.n_left:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    from tekoa.loop import feed

    original = feed.BatchFeed.next
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed.BatchFeed, "next", count)
        assert train(directory) == 75
    replayer = Replayer(directory)
    stopped = max(replayer.stored)
    assert stopped % 10
    assert replay.difference_from_stored(replayer, replayer.run(10, stopped)) is None
    assert train(directory) == 0
    replayer = Replayer(directory)
    for checkpoint in replayer.states(0, sorted(replayer.stored)[1:]):
        assert replay.difference_from_stored(replayer, checkpoint) is None


def test_the_choice_of_steps_per_dispatch_is_repeated_not_measured(train, tmp_path):
    directory = tmp_path / "run"
    assert train(directory, "--max_train_steps=1100", "--check_every_steps=50", "--max_ckpt=3") == 0
    replayer = Replayer(directory)
    assert sorted(replayer.stored) == [1000, 1050, 1100]
    for checkpoint in replayer.states(0, [1000, 1050, 1100]):
        assert replay.difference_from_stored(replayer, checkpoint) is None


def test_a_loop_of_ones_own_is_replayed(tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)

    def make_loop(read, n_rows=64):
        rows = x[:n_rows]
        data = tekoa.data.as_source({"x": rows, "y": rows.sum(1, keepdims=True)})
        task = tekoa.TrainTask(
            optimizer=optax.adam(1e-2),
            loss=lambda out, y: ((out - y) ** 2).mean(),
            data=data.batches(8, seed=1, shuffle=True),
            inputs="x",
            targets="y",
        )
        rng = jax.random.key(5)
        return tekoa.TrainLoop(read(nn.Dense(1)), task, n_steps_per_checkpoint=4, rng=rng)

    writer = tekoa.CheckpointFileWriter(tmp_path, keep=9)
    for checkpoint in make_loop(lambda model: model).until(12):
        writer(checkpoint)
    writer.close()
    assert tekoa.verify(tmp_path, make_loop, fraction=1).faults == []
    assert tekoa.replay(tmp_path, make_loop, stop=8).step == 8
    with pytest.raises(OtherDataError, match="was trained on other data") as caught:
        tekoa.replay(tmp_path, lambda read: make_loop(read, n_rows=56), stop=8)
    assert "allow_changes" not in str(caught.value)


def test_data_without_a_position_cannot_be_replayed(tmp_path):
    def make_loop(read):
        rows = np.ones((20, 4, 2), np.float32)
        task = tekoa.TrainTask(
            apply=lambda params, x: x @ params["w"],
            optimizer=optax.sgd(0.1),
            loss=lambda out, y: ((out - y) ** 2).mean(),
            data=((x, x.sum(1)) for x in rows),
        )
        model = read({"w": jax.numpy.zeros(2)})
        return tekoa.TrainLoop(model, task, n_steps_per_checkpoint=10, stdout=False)

    writer = tekoa.CheckpointFileWriter(tmp_path / "run", keep=9)
    for checkpoint in make_loop(lambda model: model):
        writer(checkpoint)
    writer.close()
    for function in (tekoa.replay, functools.partial(tekoa.verify, fraction=1), tekoa.why):
        with pytest.raises(ReplayError, match=r"has no data position: .* such as a generator"):
            function(tmp_path / "run", make_loop)
