import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.core.state import Health, StepOutput, TrainState
from tekoa.core.step import donatable_copy
from tekoa.extensions.checkpoint_files import CheckpointFileReader
from tekoa.loop.evaluate import EvalLoop
from tekoa.loop.task import EvalTask, Options, StateReader, TrainTask, check_count
from tekoa.loop.train import TrainLoop
from tekoa.testing import assert_trees_equal


class Counting:
    """A custom training: adds up all batches and records the largest value."""

    reported = ("weights_l2norm",)

    def __init__(self, data):
        self.data = data

    def split(self, batch):
        return (batch,), ()

    def axes(self, rng, batch):
        return {}

    def init(self, rng, batch, options):
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params={"total": jnp.zeros(())},
            variables={},
            opt_state=(),
            average=None,
            carry=None,
            rng=jnp.zeros(2, jnp.uint32),
            sums={"largest": self.empty(None)["largest"]},
            health=Health.zero(),
        )
        return jax.tree.map(donatable_copy, state)

    def make_step(self, options, *, keep_grads=False):
        def step(state, batch):
            total = state.params["total"] + batch.sum()
            largest = jnp.maximum(state.sums["largest"], batch.max())
            new = state.replace(
                step=state.step + 1, params={"total": total}, sums={"largest": largest}
            )
            nan = jnp.full((), jnp.nan)
            return new, StepOutput(loss=nan, gradients_l2norm=nan, weights_l2norm=jnp.abs(total))

        return step

    def empty(self, sums):
        return {"largest": jnp.full((), -jnp.inf)}

    def compute(self, sums):
        return {"largest": float(sums["largest"])}


@pytest.mark.parametrize("steps_per_dispatch", [1, 2])
def test_a_custom_training_has_its_own_step_and_metrics(steps_per_dispatch):
    data = [np.float32([i, 1]) for i in range(10)]
    loop = TrainLoop(
        None,
        Counting(data),
        n_steps=10,
        n_steps_per_checkpoint=4,
        steps_per_dispatch=steps_per_dispatch,
    )
    checkpoints = list(loop)
    assert [c.step for c in checkpoints] == [4, 8, 10]
    assert [c.metrics["train"]["largest"] for c in checkpoints] == [3, 7, 9]
    assert [float(c.state.params["total"]) for c in checkpoints] == [10, 36, 55]
    assert "loss" not in checkpoints[0].metrics["train"]
    assert checkpoints[-1].metrics["train"]["weights_l2norm"] == 55
    with pytest.raises(TypeError, match="has no model functions"):
        _ = loop.model_fns
    assert float(loop.model["total"]) == 55


def test_a_train_task_runs_the_pure_step(line):
    loop = line.loop(n_steps=4, tx=optax.sgd(0.1), steps_per_dispatch=1)
    training = loop._training
    batch = line.data(4)[0]
    state = training.init(jax.random.key(1), batch, Options())
    step = jax.jit(training.make_step(Options()))
    for batch in line.data(4):
        state, _ = step(state, batch)
    (checkpoint,) = loop
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(checkpoint.state.params)):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_reader_is_recognised_by_its_methods(tmp_path):
    assert isinstance(CheckpointFileReader(tmp_path, target=None), StateReader)
    assert not isinstance(lambda: None, StateReader)


def test_counts_must_be_whole_numbers_and_large_enough():
    assert check_count("n", np.int64(3), 1) == 3
    for value, error in ((0, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="n must be"):
            check_count("n", value, 1)


def test_tasks_take_their_arguments_by_position(line):
    tx, data = optax.adam(0.1), line.data(4)
    assert TrainTask(line.apply, tx, line.mse, data).loss is line.mse
    assert EvalTask(line.apply, {"loss": line.mse}, data).data is data
    for make, missing in ((TrainTask, "optimizer"), (EvalTask, "data")):
        with pytest.raises(TypeError, match=f"{make.__name__} needs {missing}="):
            make(line.apply)


def test_entries_of_a_dict_are_chosen_by_name(line):
    def loop_of(batches, **options):
        task = TrainTask(line.apply, optax.adam(0.1), line.mse, batches, **options)
        return TrainLoop(line.params, task, n_steps=4)

    pairs = line.data(4)
    dicts = [{"y": y, "x": x} for x, y in pairs]
    expected = list(loop_of(pairs))[-1].state
    for options in ({"inputs": "x"}, {"inputs": ["x"], "targets": "y"}):
        assert_trees_equal(list(loop_of(dicts, **options))[-1].state, expected)
    task = EvalTask(line.apply, {"loss": line.mse}, dicts, inputs="x")
    assert EvalLoop(task)(next(iter(loop_of(pairs)))).metrics["eval"]["loss"] > 0
    with pytest.raises(TypeError, match=r"matmul|dict") as error:
        loop_of(dicts)
    assert any("inputs='x', targets='y'" in note for note in error.value.__notes__)
    with pytest.raises(ValueError, match=r"no entry 'z'; it has \['x', 'y'\]"):
        loop_of(dicts, inputs="z")
    with pytest.raises(TypeError, match="not both"):
        loop_of(dicts, inputs="x", split=lambda batch: batch)
