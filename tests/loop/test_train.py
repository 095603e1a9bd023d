import logging
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.core.guard import NonFiniteError
from tekoa.loop.task import Restored, TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.testing import assert_trees_equal, count_compilations


def by_hand(line, n, **options):
    """The loop that a user would write over the pure step."""
    fns, tx = model_fns(line.params, line.apply), optax.adam(0.05)
    data = line.data(n)
    state = steps.init_state(fns, tx, jax.random.key(1), inputs=(data[0][0],))
    step = jax.jit(steps.make_train_step(fns, line.mse, tx, **options))
    for batch in data:
        state, _ = step(state, batch)
    return state


class Reader:
    """Resumes from a checkpoint in memory, as a reader of files does."""

    def __init__(self, target, checkpoint):
        self.target, self._found = target, checkpoint

    def restore(self, fresh):
        found = self._found
        assert jax.tree.structure(fresh) == jax.tree.structure(found.state)
        return Restored(state=found.state, data_state=found.data_state, facts=found.facts)


# ---- what is yielded, and when


def test_checkpoints_fall_on_multiples_and_on_the_last_step(line):
    loop = line.loop(n_steps=10)
    assert [(c.step, c.n_completed_steps) for c in loop] == [(4, 4), (8, 4), (10, 2)]
    assert loop.step == 10


def test_a_checkpoint_tells_what_the_page_promises(line):
    checkpoint = next(iter(line.loop(ema=0.9)))
    assert sorted(checkpoint.model_params) == ["b", "w"]
    assert checkpoint.model_state == {}
    assert checkpoint.optimizer_state[0].count == 4
    assert checkpoint.grads["w"].shape == (3,)
    assert float(checkpoint.loss) == checkpoint.metrics["train"]["loss"]
    assert checkpoint.average["w"].shape == (3,)
    assert (checkpoint.carry, checkpoint.rng.shape) == (None, ())
    assert checkpoint.data_state == {"next": 4}
    assert checkpoint.elapsed_time > 0
    assert set(checkpoint.metrics["train"]) == {
        "loss",
        "seconds_per_step",
        "gradients_l2norm",
        "weights_l2norm",
    }
    assert checkpoint.setup["n_weights"] == 4


def test_steps_and_checkpoints_can_be_asked_for_one_by_one(line):
    loop = line.loop(n_steps=10)
    asked = [loop.next_step().step, loop.next_checkpoint().step, loop.next_step().step]
    assert asked == [1, 4, 5]
    assert [c.step for c in loop] == [8, 10]
    with pytest.raises(StopIteration, match="All 10 steps are done"):
        loop.next_checkpoint()


def test_a_call_runs_to_a_total_and_changes_no_setting(line):
    loop = line.loop(n_steps=4, data=line.data(20))
    assert [c.step for c in loop] == [4]
    assert [c.step for c in loop(n_steps=9)] == [8, 9]
    assert (loop.n_steps, list(loop(n_steps=9))) == (4, [])
    with pytest.raises(ValueError, match="n_steps=4 is the total; this loop has completed 9"):
        iter(loop)


def test_the_distance_of_checkpoints_can_be_changed(line):
    loop = line.loop(n_steps=12)
    loop.next_checkpoint()
    loop.n_steps_per_checkpoint, loop.n_steps = 5, 11
    assert [c.step for c in loop] == [5, 10, 11]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"n_steps_per_checkpoint": 0}, ValueError, "n_steps_per_checkpoint must be 1 or more"),
        ({"n_steps": -1, "data": [1]}, ValueError, "n_steps must be 0 or more, got -1"),
        ({"n_steps": "100", "data": [1]}, TypeError, "n_steps must be a whole number, got '100'"),
        ({"steps_per_dispatch": 0}, ValueError, "steps_per_dispatch must be 'auto' or at least 1"),
        ({"on_nan": "panic"}, ValueError, "on_nan must be one of"),
    ],
)
def test_settings_out_of_range_are_refused(line, options, error, said):
    with pytest.raises(error, match=said):
        line.loop(**options)


# ---- the same numbers however it is driven


@pytest.mark.parametrize(
    "options",
    [
        {"n_steps_per_checkpoint": 1},
        {"n_steps_per_checkpoint": 5},
        {"n_steps_per_checkpoint": 12},
        {"n_steps_per_checkpoint": 12, "grads": False},
        {"n_steps_per_checkpoint": 12, "steps_per_dispatch": 4},
    ],
)
def test_any_way_to_drive_gives_the_bits_of_the_hand_written_loop(line, options):
    loop = line.loop(**options)
    for _ in loop:
        pass
    assert_trees_equal(loop.state.params, by_hand(line, 12).params)
    assert_trees_equal(loop.state.opt_state, by_hand(line, 12).opt_state)


def test_single_steps_between_checkpoints_change_nothing(line):
    loop = line.loop(steps_per_dispatch=4)
    loop.next_step(), loop.next_step(), loop.next_checkpoint(), loop.next_step()
    for _ in loop:
        pass
    assert_trees_equal(loop.state.params, by_hand(line, 12).params)


@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_a_resumed_run_gives_the_bits_of_one_that_was_not_interrupted(line, steps_per_dispatch):
    whole = list(line.loop(n_steps=20, ema=0.9, steps_per_dispatch=steps_per_dispatch))
    for middle in whole[:-1]:
        again = list(line.loop(n_steps=20, ema=0.9, init=Reader(line.params, middle)))
        assert [c.step for c in again] == [c.step for c in whole if c.step > middle.step]
        assert_trees_equal(again[-1].state, whole[-1].state)
        assert again[-1].facts == whole[-1].facts


def test_metrics_after_a_resume_cover_the_same_steps(line):
    def loss(out, y):
        return line.mse(out, y), {"largest": jnp.max(y)}

    first, second, _ = line.loop(loss=loss)
    resumed = next(iter(line.loop(loss=loss, init=Reader(line.params, first))))
    expected = np.mean([y.max() for _, y in line.data(12)[4:8]])
    for checkpoint in (second, resumed):
        assert checkpoint.metrics["train"]["largest"] == pytest.approx(expected, rel=1e-6)


def test_an_explicit_number_of_steps_per_dispatch_wins_over_the_saved_one(line):
    middle = next(iter(line.loop(steps_per_dispatch=4)))
    loop = line.loop(init=Reader(line.params, middle), steps_per_dispatch=1)
    assert loop.next_step().facts["steps_per_dispatch"] == 1


# ---- what is yielded stays


@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_a_checkpoint_survives_the_steps_after_it(line, steps_per_dispatch):
    loop = line.loop(n_steps=200, steps_per_dispatch=steps_per_dispatch, ema=0.9)
    kept = loop.next_checkpoint()
    values = jax.tree.map(np.array, (kept.model_params, kept.optimizer_state, kept.grads))
    for _ in loop:
        pass
    assert loop.step == 200
    assert_trees_equal((kept.model_params, kept.optimizer_state, kept.grads), values)
    assert kept.state.step == 4


def test_the_state_and_the_model_survive_the_steps_after_them(line):
    loop = line.loop()
    loop.next_step()
    state, model = loop.state, loop.model
    values = jax.tree.map(np.array, (state.params, model))
    loop.next_checkpoint()
    assert_trees_equal((state.params, model), values)


def test_one_compilation_per_step_function(line):
    loop = line.loop(n_steps=200)
    with count_compilations() as compiled:
        first = loop.next_checkpoint()
    assert sum("step" in name for name in compiled.names) == 2  # With and without gradients.
    del first
    with count_compilations() as compiled:
        for _ in loop:
            pass
    assert compiled.names == []


def test_lbfgs_compiles_as_little(line):
    loop = line.loop(tx=optax.lbfgs(), n_steps=16, grads=False)
    with count_compilations() as compiled:
        checkpoints = list(loop)
    assert sum("step" in name for name in compiled.names) == 2  # With and without norms.
    first, *_, last = (c.metrics["train"]["loss"] for c in checkpoints)
    assert last < first


# ---- data


def test_data_that_ends_ends_the_loop_with_a_checkpoint_and_a_line(line, capsys):
    loop = line.loop(data=line.data(6), n_steps=100, stdout=True)
    checkpoints = list(loop)
    assert [c.step for c in checkpoints] == [4, 6]
    assert checkpoints[-1].grads is not None
    assert capsys.readouterr().out == "The data ended at step 6.\n"
    with pytest.raises(StopIteration):
        loop.next_step()


def test_data_that_ends_at_a_checkpoint_gives_it_once(line):
    assert [c.step for c in line.loop(data=line.data(8), n_steps=None)] == [4, 8]


@pytest.mark.parametrize("n", [5, 8, 9, 11])
def test_data_may_end_anywhere_in_a_dispatch_of_several_steps(line, n):
    options = {"n_steps": None, "n_steps_per_checkpoint": 50}
    together = list(line.loop(data=line.data(n), steps_per_dispatch=4, **options))
    assert [c.step for c in together] == [n]
    assert together[0].grads is not None
    assert_trees_equal(together[0].model_params, by_hand(line, n).params)


def test_batches_may_be_dicts(line):
    data = [{"x": x, "y": y} for x, y in line.data(12)]
    loop = line.loop(
        data=data,
        model=lambda p, batch: line.apply(p, batch["x"]),
        loss=lambda out, batch: line.mse(out, batch["y"]),
    )
    assert_trees_equal(list(loop)[-1].model_params, by_hand(line, 12).params)


def test_a_split_of_ones_own_takes_other_batches(line):
    data = [(x, np.zeros(2), y) for x, y in line.data(12)]
    task = TrainTask(
        apply=line.apply,
        optimizer=optax.adam(0.05),
        loss=line.mse,
        data=data,
        split=lambda batch: ((batch[0],), (batch[2],)),
    )
    loop = TrainLoop(line.params, task, n_steps=12, rnkey=jax.random.key(1))
    assert_trees_equal(list(loop)[-1].model_params, by_hand(line, 12).params)


def test_a_model_may_give_its_loss_itself(line):
    loop = line.loop(
        data=[((x, y), ()) for x, y in line.data(12)],
        model=lambda p, x, y: line.mse(line.apply(p, x), y),
        loss=None,
    )
    assert_trees_equal(list(loop)[-1].model_params, by_hand(line, 12).params)


def test_the_model_can_be_initialised_with_another_sample(line):
    seen = []

    def init(rng, x):
        seen.append(x.shape)
        return line.params

    line.loop(init=init, input_sample=np.zeros((1, 3), np.float32))
    assert seen == [(1, 3)]


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (["a"], TypeError, "Data must yield pairs .* got a str"),
        ([(np.zeros((2, 3)), "cat")], TypeError, "Entry '1' of the batch must be an array"),
        ([], ValueError, "The data is empty"),
        (3, TypeError, "Data must be an iterable of batches, got int"),
        ({"x": 1, "y": 2}, TypeError, "got a str"),
    ],
)
def test_bad_data_is_told_at_once(line, data, error, said):
    with pytest.raises(error, match=said):
        line.loop(data=data)


def test_a_loss_that_is_no_number_is_told_before_training(line):
    with pytest.raises(TypeError, match=r"The loss must be .* float32 of shape \(8,\)"):
        line.loop(loss=lambda out, y: out - y)


def test_a_batch_of_another_shape_is_one_line(line, caplog):
    data = line.data(3) + line.data(3, n_rows=5)
    with caplog.at_level(logging.WARNING, "tekoa"):
        assert [c.step for c in line.loop(data=data, n_steps=6)] == [4, 6]
    (record,) = caplog.records
    assert "from 0 float32[8,3], 1 float32[8] to 0 float32[5,3], 1 float32[5]" in record.message


# ---- numbers that are not finite


def poisoned(line, at):
    data = line.data(12)
    data[at] = (data[at][0] * np.nan, data[at][1])
    return data


def test_a_bad_number_stops_the_loop_at_the_last_good_step(line):
    loop = line.loop(data=poisoned(line, 5))
    with pytest.raises(NonFiniteError, match=r"At step 6 the loss was nan and the gradient of 'b'"):
        list(loop)
    assert loop.step == 5
    assert_trees_equal(loop.state.params, by_hand(line, 5).params)
    # The record to save is that of five good steps, in the state and in the data.
    kept = loop.checkpoint()
    assert (kept.step, kept.data_state) == (5, {"next": 5})
    assert int(kept.state.health.n_bad) == 0


def test_bad_steps_can_be_skipped_and_are_counted(line):
    last = list(line.loop(data=poisoned(line, 5), on_nan="skip"))[-1]
    assert last.metrics["train"]["skipped_steps"] == 1
    assert last.step == 12
    assert np.isfinite(last.model_params["w"]).all()


def test_bad_numbers_can_be_ignored(line):
    last = list(line.loop(data=poisoned(line, 5), on_nan="ignore"))[-1]
    assert np.isnan(last.metrics["train"]["loss"])


# ---- interruptions


def test_a_stage_that_raises_does_not_lose_the_loop(line):
    loop = line.loop()

    def fail():
        for _ in loop:
            raise RuntimeError("a stage")

    with pytest.raises(RuntimeError, match="a stage"):
        fail()
    assert [c.step for c in loop] == [8, 12]
    assert_trees_equal(loop.state.params, by_hand(line, 12).params)


def test_an_error_in_the_data_does_not_lose_the_loop(line):
    data = iter(line.data(12))

    class Failing:
        n = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.n += 1
            if self.n == 7:
                raise OSError("disk")
            return next(data)

    loop = line.loop(data=Failing())
    with pytest.raises(OSError, match="disk"):
        list(loop)
    assert loop.step == int(loop.state.step)
    assert [c.step for c in loop][-1] == 12
    assert_trees_equal(loop.state.params, by_hand(line, 12).params)


def run_for_long(loop, timer):
    timer.start()
    loop.next_checkpoint()
    time.sleep(5)


@pytest.fixture
def interrupts():
    """Interrupts are heard: a shell's background job is started deaf to them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_leaves_a_loop_that_goes_on(line):
    loop = line.loop(data=line.data(30_000), n_steps=30_000, n_steps_per_checkpoint=10_000)
    loop.next_step(), loop.next_step()
    interrupts = [0.2, 0.05, 0.01]
    for seconds in interrupts:
        timer = threading.Timer(seconds, signal.raise_signal, (signal.SIGINT,))
        try:
            with pytest.raises(KeyboardInterrupt):
                run_for_long(loop, timer)
        finally:
            timer.join()
        assert loop.step == int(loop.state.step)
    assert loop.next_step().step == loop.step
    assert np.isfinite(loop.state.params["w"]).all()


def test_a_flag_stops_between_checkpoints_and_the_rest_is_exact(line):
    class Flag:
        n = 0

        def is_set(self):
            self.n += 1
            return self.n > 9

    whole = list(line.loop(steps_per_dispatch=4))[-1]
    stopped = list(line.loop(steps_per_dispatch=4, stop_flag=Flag()))[-1]
    assert stopped.step not in (4, 8, 12)
    resumed = list(line.loop(init=Reader(line.params, stopped)))[-1]
    assert_trees_equal(resumed.state, whole.state)


def test_metrics_of_a_stretch_that_was_interrupted_are_those_of_the_whole(line):
    class Flag:
        step = 0

        def is_set(self):
            self.step += 1
            return self.step > 3

    def loss(out, y):
        return jnp.mean((out - y) ** 2), {"error": jnp.mean(jnp.abs(out - y))}

    options = {"loss": loss, "n_steps_per_checkpoint": 12, "steps_per_dispatch": 1}
    (whole,) = line.loop(**options)
    (stopped,) = line.loop(**options, stop_flag=Flag())
    assert 0 < stopped.step < 12
    (resumed,) = line.loop(**options, init=Reader(line.params, stopped))
    assert resumed.metrics["train"]["error"] == whole.metrics["train"]["error"]


def test_stop_ends_the_iteration_and_not_the_loop(line):
    loop = line.loop()
    seen = []
    for checkpoint in loop:
        seen.append(checkpoint.step)
        loop.stop()
    assert seen == [4]
    assert loop.next_checkpoint().step == 8
    assert [c.step for c in loop] == [12]


# ---- models and devices


def test_an_nnx_model_comes_back_merged(line):
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    loop = line.loop(init=module, model=None, loss=lambda out, y: line.mse(out[:, 0], y))
    last = list(loop)[-1]
    assert isinstance(loop.model, nnx.Linear)
    np.testing.assert_array_equal(loop.model.kernel[...], last.model_params["kernel"])
    assert not np.array_equal(loop.model.kernel[...], module.kernel[...])


def test_the_model_is_that_of_the_average_where_there_is_one(line):
    loop = line.loop(ema=0.9)
    last = list(loop)[-1]
    assert_trees_equal(loop.model, last.average)


@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_eight_devices_give_the_same_losses(line, steps_per_dispatch):
    alone = [c.metrics["train"]["loss"] for c in line.loop(n_steps_per_checkpoint=6)]
    loop = line.loop(
        n_steps_per_checkpoint=6, devices=jax.devices(), steps_per_dispatch=steps_per_dispatch
    )
    with count_compilations() as compiled:
        split = [c.metrics["train"]["loss"] for c in loop]
    assert split == pytest.approx(alone, rel=1e-5)
    assert len(loop.state.params["w"].devices()) == 8
    assert sum("jit(step)" in name or name == "step" for name in compiled.names) <= 2


def test_the_present_state_is_a_record_too(line):
    loop = line.loop()
    before = loop.checkpoint()
    loop.next_checkpoint()
    assert (before.step, before.data_state) == (0, {"next": 0})
    np.testing.assert_array_equal(before.model_params["w"], line.params["w"])
