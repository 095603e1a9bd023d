import dataclasses
import gc
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

from tekoa import data as data_lib
from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.core.nonfinite import NonFiniteError
from tekoa.extensions.checkpoint_files import CheckpointFileReader, CheckpointFileWriter
from tekoa.loop.task import Restored, TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.testing import assert_trees_equal, count_compilations


def by_hand(line, n, **options):
    """The loop that a user would write around the pure step."""
    fns, tx = model_fns(line.params, line.apply), optax.adam(0.05)
    data = line.data(n)
    state = steps.init_state(fns, tx, jax.random.key(1), inputs=(data[0][0],))
    step = jax.jit(steps.make_train_step(fns, line.mse, tx, **options))
    for batch in data:
        state, _ = step(state, batch)
    return state


class Reader:
    """Resumes from a checkpoint in memory, as a file reader does from disk."""

    def __init__(self, target, checkpoint):
        self.target, self._saved = target, checkpoint

    def restore(self, fresh):
        saved = self._saved
        assert jax.tree.structure(fresh) == jax.tree.structure(saved.state)
        return Restored(
            state=saved.state, data_state=saved.data_state, facts=saved.facts, commit="0a1b"
        )


# ---- which checkpoints are yielded


def test_checkpoints_fall_on_multiples_and_on_the_last_step(line):
    loop = line.loop(n_steps=10)
    assert [(c.step, c.n_completed_steps) for c in loop] == [(4, 4), (8, 4), (10, 2)]
    assert loop.step == 10


def test_a_checkpoint_has_the_documented_fields(line):
    checkpoint = next(iter(line.loop(ema=0.9, grads=True)))
    assert sorted(checkpoint.model_params) == ["b", "w"]
    assert checkpoint.model_state == {}
    assert checkpoint.optimizer_state[0].count == 4
    assert checkpoint.grads["w"].shape == (3,)
    assert float(checkpoint.loss) == checkpoint.metrics["train"]["last_loss"]
    assert checkpoint.average["w"].shape == (3,)
    assert (checkpoint.carry, checkpoint.rng.shape) == (None, ())
    assert checkpoint.data_state == {"next": 4}
    assert checkpoint.elapsed_time > 0
    assert set(checkpoint.metrics["train"]) == {
        "loss",
        "last_loss",
        "seconds_per_step",
        "gradients_l2norm",
        "weights_l2norm",
    }
    assert checkpoint.setup["n_weights"] == 4


def test_steps_and_checkpoints_can_be_run_one_by_one(line):
    loop = line.loop(n_steps=10)
    completed = [loop.next_step().step, loop.next_checkpoint().step, loop.next_step().step]
    assert completed == [1, 4, 5]
    assert [c.step for c in loop] == [8, 10]
    with pytest.raises(StopIteration, match="All 10 steps are complete"):
        loop.next_checkpoint()


def test_until_and_a_call_run_to_a_total_and_change_no_setting(line):
    loop = line.loop(n_steps=4, data=line.data(20))
    assert [c.step for c in loop] == [4]
    assert [c.step for c in loop.until(9)] == [8, 9]
    assert (loop.n_steps, list(loop.until(9))) == (4, [])
    assert [c.step for c in loop(n_steps=13)] == [12, 13]
    with pytest.raises(ValueError, match="n_steps=4, but 13 steps are complete"):
        loop.until(4)


def test_a_loop_that_is_complete_says_so(line, capsys):
    loop = line.loop(n_steps=4)
    assert (next(loop).step, list(loop)) == (4, [])
    line_of_output = "Nothing to train: the loop is at step 4, and n_steps=4 is the total.\n"
    assert capsys.readouterr().out == line_of_output
    with pytest.raises(StopIteration):
        next(loop)


def test_the_loss_is_the_mean_since_the_last_checkpoint(line):
    first, *_ = line.loop(n_steps_per_checkpoint=4)
    each = [float(c.loss) for c in line.loop(n_steps_per_checkpoint=1)]
    train = first.metrics["train"]
    assert train["loss"] == pytest.approx(np.mean(each[:4]), rel=1e-6)
    assert train["last_loss"] == float(first.loss) == pytest.approx(each[3], rel=1e-6)


def test_a_state_without_a_sum_of_the_loss_is_resumed(line, tmp_path):
    """As saved by earlier versions."""
    middle = line.loop().next_checkpoint()
    writer = CheckpointFileWriter(tmp_path)
    writer(dataclasses.replace(middle, state=middle.state.replace(sums={})))
    writer.close()
    loop = line.loop(model=CheckpointFileReader(tmp_path, line.params))
    assert loop.step == 4
    assert_trees_equal(list(loop)[-1].state, list(line.loop())[-1].state)


def test_the_time_of_loading_is_that_of_the_reader(line):
    middle = line.loop().next_checkpoint()

    class Slow(Reader):
        def restore(self, fresh):
            time.sleep(0.3)
            return super().restore(fresh)

    setup = line.loop(model=Slow(line.params, middle)).next_step().setup
    assert setup["load_seconds"] >= 0.3
    assert line.loop().next_step().setup["load_seconds"] == 0


def test_a_loop_and_a_checkpoint_are_shown_in_one_line(line):
    loop = line.loop(n_steps=12)
    checkpoint = loop.next_checkpoint()
    assert repr(checkpoint) == f"<Summary step 4, loss {float(checkpoint.loss):.4g}>"
    assert repr(loop) == "<TrainLoop at step 4 of 12, 4 weights>"


def test_the_checkpoint_interval_can_be_changed(line):
    loop = line.loop(n_steps=12)
    loop.next_checkpoint()
    loop.n_steps_per_checkpoint, loop.n_steps = 5, 11
    assert [c.step for c in loop] == [5, 10, 11]


def test_the_names_of_the_original_guide_are_accepted(line):
    task = TrainTask(
        apply=line.apply, optimizer=optax.adam(0.05), loss=line.mse, data=line.data(12)
    )
    loop = TrainLoop(init=line.params, task=task, n_steps=12, rnkey=jax.random.key(1))
    assert_trees_equal(list(loop)[-1].state, list(line.loop(n_steps_per_checkpoint=12))[-1].state)
    for names in ({"init": line.params}, {"rng": loop.state.rng, "rnkey": loop.state.rng}):
        with pytest.raises(TypeError, match="two names of the same argument"):
            TrainLoop(line.params, task, **names)


def test_checkpoints_hold_no_gradients_by_default(line):
    assert line.loop().next_checkpoint().grads is None


def test_an_evaluation_uses_the_model_and_split_of_the_loop(line):
    data = [(y, x) for x, y in line.data(12)]
    task = TrainTask(
        apply=line.apply,
        optimizer=optax.adam(0.05),
        loss=line.mse,
        data=data,
        split=lambda batch: ((batch[1],), (batch[0],)),
    )
    loop = TrainLoop(line.params, task)
    evaluate = loop.evaluation({"mse": line.mse}, data[:3], n_steps=2, label="valid")
    last = loop.next_checkpoint()
    params = jax.tree.map(np.asarray, last.model_params)
    errors = [np.mean((x @ params["w"] + params["b"] - y) ** 2) for y, x in data[:2]]
    assert evaluate(last).metrics["valid"]["mse"] == pytest.approx(np.mean(errors), rel=1e-5)


def test_an_evaluation_runs_on_the_mesh_of_the_loop(line):
    loop = line.loop(devices=jax.devices())
    evaluate = loop.evaluation({"mse": line.mse}, line.data(2))
    alone = loop.evaluation({"mse": line.mse}, line.data(2), devices=jax.devices()[:1])
    last = loop.next_checkpoint()
    assert evaluate._place.layout is loop._place.layout
    mse = [evaluation(last).metrics["eval"]["mse"] for evaluation in (evaluate, alone)]
    assert mse[0] == pytest.approx(mse[1], rel=1e-5)


def test_the_stop_flag_can_be_set_later(line):
    flag = threading.Event()
    loop = line.loop()
    loop.stop_flag = flag
    assert loop.stop_flag is flag
    assert loop.next_checkpoint().step == 4
    flag.set()
    assert list(loop) == []


def test_the_hook_is_called_before_each_dispatch(line):
    loop, completed = line.loop(), []
    loop.before_dispatch = completed.append
    loop.next_checkpoint()
    assert completed == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_steps_per_checkpoint": 0}, ValueError, "n_steps_per_checkpoint must be 1 or more"),
        ({"n_steps": -1, "data": [1]}, ValueError, "n_steps must be 0 or more, got -1"),
        ({"n_steps": "100", "data": [1]}, TypeError, "n_steps must be a whole number, got '100'"),
        ({"steps_per_dispatch": 0}, ValueError, "steps_per_dispatch must be 'auto' or at least 1"),
        ({"on_nan": "panic"}, ValueError, "on_nan must be one of"),
    ],
)
def test_settings_out_of_range_are_errors(line, options, error, message):
    with pytest.raises(error, match=message):
        line.loop(**options)


# ---- the same numbers however the loop is driven


@pytest.mark.parametrize(
    "options",
    [
        {"n_steps_per_checkpoint": 1},
        {"n_steps_per_checkpoint": 5},
        {"n_steps_per_checkpoint": 12},
        {"n_steps_per_checkpoint": 12, "grads": True},
        {"n_steps_per_checkpoint": 12, "steps_per_dispatch": 4},
    ],
)
def test_the_loop_computes_the_bits_of_a_hand_written_loop(line, options):
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
def test_a_resumed_run_computes_the_bits_of_an_uninterrupted_run(line, steps_per_dispatch):
    complete = list(line.loop(n_steps=20, ema=0.9, steps_per_dispatch=steps_per_dispatch))
    for middle in complete[:-1]:
        resumed = list(line.loop(n_steps=20, ema=0.9, model=Reader(line.params, middle)))
        assert [c.step for c in resumed] == [c.step for c in complete if c.step > middle.step]
        assert_trees_equal(resumed[-1].state, complete[-1].state)
        assert resumed[-1].facts == complete[-1].facts
        assert (complete[-1].resumed_from, resumed[-1].resumed_from) == ("", "0a1b")


def test_resuming_is_reported(line, capsys):
    middle = line.loop().next_checkpoint()
    line.loop(model=Reader(line.params, middle))
    assert capsys.readouterr().out == "Resuming from step 4.\n"
    line.loop(model=Reader(line.params, middle), stdout=False)
    assert not capsys.readouterr().out


def test_metrics_after_a_resume_cover_the_same_steps(line):
    def loss(out, y):
        return line.mse(out, y), {"largest": jnp.max(y)}

    first, second, _ = line.loop(loss=loss)
    resumed = next(iter(line.loop(loss=loss, model=Reader(line.params, first))))
    expected = np.mean([y.max() for _, y in line.data(12)[4:8]])
    for checkpoint in (second, resumed):
        assert checkpoint.metrics["train"]["largest"] == pytest.approx(expected, rel=1e-6)


def test_explicit_steps_per_dispatch_override_the_saved_number(line):
    middle = next(iter(line.loop(steps_per_dispatch=4)))
    loop = line.loop(model=Reader(line.params, middle), steps_per_dispatch=1)
    assert loop.next_step().facts["steps_per_dispatch"] == 1


# ---- checkpoints stay valid


@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_a_checkpoint_survives_the_steps_after_it(line, steps_per_dispatch):
    loop = line.loop(n_steps=200, steps_per_dispatch=steps_per_dispatch, ema=0.9, grads=True)
    first = loop.next_checkpoint()
    values = jax.tree.map(np.array, (first.model_params, first.optimizer_state, first.grads))
    for _ in loop:
        pass
    assert loop.step == 200
    assert_trees_equal((first.model_params, first.optimizer_state, first.grads), values)
    assert first.state.step == 4


def test_the_state_and_the_model_survive_the_steps_after_them(line):
    loop = line.loop()
    loop.next_step()
    state, model = loop.state, loop.model
    values = jax.tree.map(np.array, (state.params, model))
    loop.next_checkpoint()
    assert_trees_equal((state.params, model), values)


def test_one_compilation_per_step_function(line):
    loop = line.loop(n_steps=200, grads=True)
    with count_compilations() as compiled:
        first = loop.next_checkpoint()
    assert sum("step" in name for name in compiled.names) == 2  # With and without gradients.
    del first
    with count_compilations() as compiled:
        for _ in loop:
            pass
    assert compiled.names == []


def test_lbfgs_is_compiled_as_often(line):
    loop = line.loop(tx=optax.lbfgs(), n_steps=16)
    with count_compilations() as compiled:
        checkpoints = list(loop)
    assert sum("step" in name for name in compiled.names) == 2  # With and without norms.
    first, *_, last = (c.metrics["train"]["loss"] for c in checkpoints)
    assert last < first


# ---- data


def test_the_end_of_the_data_is_a_checkpoint_and_is_reported(line, capsys):
    loop = line.loop(data=line.data(6), n_steps=100, grads=True)
    checkpoints = list(loop)
    assert [c.step for c in checkpoints] == [4, 6]
    assert checkpoints[-1].grads is not None
    assert capsys.readouterr().out == "The data ended at step 6 of 100.\n"
    with pytest.raises(StopIteration):
        loop.next_step()


def test_the_end_of_the_data_at_a_checkpoint_is_yielded_once(line):
    assert [c.step for c in line.loop(data=line.data(8), n_steps=None)] == [4, 8]


@pytest.mark.parametrize("n", [5, 8, 9, 11])
def test_the_data_may_end_anywhere_in_a_group_of_steps(line, n):
    options = {"n_steps": None, "n_steps_per_checkpoint": 50, "grads": True}
    checkpoints = list(line.loop(data=line.data(n), steps_per_dispatch=4, **options))
    assert [c.step for c in checkpoints] == [n]
    assert checkpoints[0].grads is not None
    assert_trees_equal(checkpoints[0].model_params, by_hand(line, n).params)


def test_batches_may_be_dicts(line):
    data = [{"x": x, "y": y} for x, y in line.data(12)]
    loop = line.loop(
        data=data,
        apply=lambda p, batch: line.apply(p, batch["x"]),
        loss=lambda out, batch: line.mse(out, batch["y"]),
    )
    assert_trees_equal(list(loop)[-1].model_params, by_hand(line, 12).params)


def test_a_custom_split_handles_other_batches(line):
    data = [(x, np.zeros(2), y) for x, y in line.data(12)]
    task = TrainTask(
        apply=line.apply,
        optimizer=optax.adam(0.05),
        loss=line.mse,
        data=data,
        split=lambda batch: ((batch[0],), (batch[2],)),
    )
    loop = TrainLoop(line.params, task, n_steps=12, rng=jax.random.key(1))
    assert_trees_equal(list(loop)[-1].model_params, by_hand(line, 12).params)


def test_a_model_may_return_its_loss(line):
    loop = line.loop(
        data=[((x, y), ()) for x, y in line.data(12)],
        apply=lambda p, x, y: line.mse(line.apply(p, x), y),
        loss=None,
    )
    assert_trees_equal(list(loop)[-1].model_params, by_hand(line, 12).params)


def test_the_model_can_be_initialised_with_another_sample(line):
    shapes = []

    def init(rng, x):
        shapes.append(x.shape)
        return line.params

    line.loop(model=init, input_sample=np.zeros((1, 3), np.float32))
    assert shapes == [(1, 3)]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (["a"], TypeError, "Data must yield pairs .* got a str"),
        ([(np.zeros((2, 3)), "cat")], TypeError, "Entry '1' of the batch must be an array"),
        ([], ValueError, "The data is empty"),
        (3, TypeError, "Data must be an iterable of batches, got int"),
        ({"x": 1, "y": 2}, TypeError, "got a str"),
    ],
)
def test_bad_data_is_an_error_before_training(line, data, error, message):
    with pytest.raises(error, match=message):
        line.loop(data=data)


def test_a_loss_that_is_not_a_number_is_an_error_before_training(line):
    with pytest.raises(TypeError, match=r"The loss must be .* float32 of shape \(8,\)"):
        line.loop(loss=lambda out, y: out - y)


def test_a_batch_of_another_shape_is_logged_once(line, caplog):
    data = line.data(3) + line.data(3, n_rows=5)
    with caplog.at_level(logging.WARNING, "tekoa"):
        assert [c.step for c in line.loop(data=data, n_steps=6)] == [4, 6]
    (record,) = caplog.records
    assert "from 0 float32[8,3], 1 float32[8] to 0 float32[5,3], 1 float32[5]" in record.message


def scheduled(n_rows, **options):
    """Batches whose rows change, as the loop of `line` expects them."""
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    source = data_lib.as_source([(row, row.sum() + 1) for row in x])
    return source.batches(n_rows, seed=3, shuffle=True, **options)


def test_scheduled_shapes_are_compiled_once_each_and_reported(line, capsys):
    loop = line.loop(data=scheduled({0: 8, 6: 4, 10: 8, 14: 4}), n_steps=24, stdout=True)
    with count_compilations() as compiled:
        checkpoints = list(loop)
    # Two shapes, each for steps with and without norms.
    assert sum("step" in name for name in compiled.names) == 4
    assert capsys.readouterr().out.count("recompiling") == 1
    assert [c.setup["n_rows"] for c in checkpoints] == [8, 4, 8, 4, 4, 4]
    assert checkpoints[-1].data_state["examples"] == 8 * 6 + 4 * 4 + 8 * 4 + 4 * 10


@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 3}, {"accumulate": 2}], ids=str)
def test_a_schedule_resumes_exactly_from_every_step(line, options):
    def loop(**more):
        return line.loop(data=scheduled({0: 8, 5: 4, 9: 16}), n_steps=14, **options, **more)

    complete = list(loop())
    for middle in [*complete[:-1], *(Stopped.at(loop(), step) for step in (5, 6, 10))]:
        resumed = list(loop(model=Reader(line.params, middle)))
        assert_trees_equal(resumed[-1].state, complete[-1].state)
        assert resumed[-1].data_state == complete[-1].data_state


class Stopped:
    """A stop flag that is set once a loop has completed some steps."""

    def __init__(self, loop, step):
        self._loop, self._step = loop, step

    def is_set(self):
        return self._loop.step >= self._step

    @classmethod
    def at(cls, loop, step):
        loop.stop_flag = cls(loop, step)
        *_, last = loop
        assert step <= last.step <= step + 3
        return last


def test_rows_that_cannot_be_divided_are_found_before_the_first_step(line):
    with pytest.raises(ValueError, match=r"Batches of 9 rows .* accumulate=2 .* multiples of 2"):
        line.loop(data=scheduled({0: 8, 1000: 9}), accumulate=2)
    with pytest.raises(ValueError, match=r"Batches of 12 rows .* on 8 devices"):
        line.loop(data=scheduled({0: 8, 1000: 12}), devices=jax.devices())


# ---- NaN and Inf


def poison(line, at):
    data = line.data(12)
    data[at] = (data[at][0] * np.nan, data[at][1])
    return data


def test_nan_stops_the_loop_at_the_last_good_step(line):
    loop = line.loop(data=poison(line, 5))
    with pytest.raises(NonFiniteError, match=r"At step 6 the loss was nan and the gradient of 'b'"):
        list(loop)
    assert loop.step == 5
    assert_trees_equal(loop.state.params, by_hand(line, 5).params)
    # The checkpoint to save is that of five good steps, in the state and in the data.
    checkpoint = loop.checkpoint()
    assert (checkpoint.step, checkpoint.data_state) == (5, {"next": 5})
    assert int(checkpoint.state.health.n_bad) == 0


def test_skipped_steps_are_counted(line):
    last = list(line.loop(data=poison(line, 5), on_nan="skip"))[-1]
    assert last.metrics["train"]["skipped_steps"] == 1
    assert last.step == 12
    assert np.isfinite(last.model_params["w"]).all()


def test_nan_can_be_ignored(line):
    last = list(line.loop(data=poison(line, 5), on_nan="ignore"))[-1]
    assert np.isnan(last.metrics["train"]["loss"])


# ---- interruptions


def test_the_loop_survives_an_error_in_a_stage(line):
    loop = line.loop()

    def fail():
        for _ in loop:
            raise RuntimeError("a stage")

    with pytest.raises(RuntimeError, match="a stage"):
        fail()
    assert [c.step for c in loop] == [8, 12]
    assert_trees_equal(loop.state.params, by_hand(line, 12).params)


def test_the_loop_survives_an_error_in_the_data(line):
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
    """Enables SIGINT, which background jobs of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # In JAX's callback of the garbage collector, an interrupt would be lost.
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_the_loop_survives_interrupts(line):
    loop = line.loop(data=line.data(30_000), n_steps=30_000, n_steps_per_checkpoint=2)
    loop.next_checkpoint(), loop.next_checkpoint()  # JAX loses some interrupts when it compiles.
    loop.n_steps_per_checkpoint = 10_000
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


class SetAfter:
    """A stop flag that is set once it was polled `n` times."""

    def __init__(self, n):
        self._n = n

    def is_set(self):
        self._n -= 1
        return self._n < 0


def test_a_run_stopped_between_checkpoints_resumes_exactly(line):
    complete = list(line.loop(steps_per_dispatch=4))[-1]
    stopped = list(line.loop(steps_per_dispatch=4, stop_flag=SetAfter(9)))[-1]
    assert stopped.step not in (4, 8, 12)
    resumed = list(line.loop(model=Reader(line.params, stopped)))[-1]
    assert_trees_equal(resumed.state, complete.state)


def test_metrics_of_an_interrupted_segment_cover_all_of_its_steps(line):
    def loss(out, y):
        return jnp.mean((out - y) ** 2), {"error": jnp.mean(jnp.abs(out - y))}

    options = {"loss": loss, "n_steps_per_checkpoint": 12, "steps_per_dispatch": 1}
    (complete,) = line.loop(**options)
    (stopped,) = line.loop(**options, stop_flag=SetAfter(3))
    assert 0 < stopped.step < 12
    (resumed,) = line.loop(**options, model=Reader(line.params, stopped))
    assert resumed.metrics["train"]["error"] == complete.metrics["train"]["error"]


def test_stop_ends_the_iteration_but_not_the_loop(line):
    loop = line.loop()
    completed = []
    for checkpoint in loop:
        completed.append(checkpoint.step)
        loop.stop()
    assert completed == [4]
    assert loop.next_checkpoint().step == 8
    assert [c.step for c in loop] == [12]


# ---- models and devices


def test_the_trained_nnx_model_is_a_module(line):
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    loop = line.loop(model=module, apply=None, loss=lambda out, y: line.mse(out[:, 0], y))
    last = list(loop)[-1]
    assert isinstance(loop.model, nnx.Linear)
    np.testing.assert_array_equal(loop.model.kernel[...], last.model_params["kernel"])
    assert not np.array_equal(loop.model.kernel[...], module.kernel[...])


def test_the_model_and_the_averaged_model_are_two(line):
    loop = line.loop(ema=0.9)
    last = list(loop)[-1]
    assert_trees_equal(loop.model, last.model_params)
    assert_trees_equal(loop.averaged_model, last.average)
    with pytest.raises(ValueError, match="pass ema= to TrainLoop"):
        _ = line.loop().averaged_model


@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_eight_devices_compute_the_same_losses(line, steps_per_dispatch):
    single = [c.metrics["train"]["loss"] for c in line.loop(n_steps_per_checkpoint=6)]
    loop = line.loop(
        n_steps_per_checkpoint=6, devices=jax.devices(), steps_per_dispatch=steps_per_dispatch
    )
    with count_compilations() as compiled:
        split = [c.metrics["train"]["loss"] for c in loop]
    assert split == pytest.approx(single, rel=1e-5)
    assert len(loop.state.params["w"].devices()) == 8
    assert sum("jit(step)" in name or name == "step" for name in compiled.names) <= 2


def test_the_current_state_is_a_checkpoint(line):
    loop = line.loop()
    before = loop.checkpoint()
    loop.next_checkpoint()
    assert (before.step, before.data_state) == (0, {"next": 0})
    np.testing.assert_array_equal(before.model_params["w"], line.params["w"])
