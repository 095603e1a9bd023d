import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa.data import DataError
from tekoa.estimator import InferState, MeanMetrics, TrainState
from tekoa.estimator.long_infer import Inference, pairs
from tekoa.estimator.long_train import OwnTraining
from tekoa.extensions import files
from tekoa.loop.train import TrainLoop
from tekoa.testing import count_compilations


class Model(nn.Module):
    """Adds up all that it has seen."""

    @nn.compact
    def __call__(self, x):
        total = self.variable("memory", "total", jnp.zeros, ())
        scale = self.param("scale", nn.initializers.ones, ())
        found = scale * x + total.value
        if not self.is_initializing():
            total.value = total.value + x.sum()
        return found


def by_row(config, batch, state):
    found, variables = state.apply_fn(state.variables(), batch, mutable=state.mutable())
    return state.replace(ret=found, _vars=variables)


def by_batch(config, batch, state):
    state = by_row(config, batch, state)
    return state.replace(ret=state.ret.sum()[None])


def inference(infer_step=by_row, **options):
    module = types.SimpleNamespace(
        get_infer_state=lambda config: InferState.create(Model(), jnp.zeros(1), **options),
        infer_step=infer_step,
    )
    return Inference(module, None, None, batch_size=3)


def batches(n, size=3):
    rows = np.arange(n, dtype=np.float32)
    return [(i, rows[i : i + size]) for i in range(0, n, size)]


def results(made, n, path=None):
    return list(made.results(path, batches(n), None))


def test_state_goes_from_batch_to_batch_and_starts_anew_with_each_pass():
    made = inference()
    for _ in range(2):
        found = results(made, 8)
        assert [beside for beside, _ in found] == [0, 3, 6]
        assert [x.tolist() for _, x in found] == [[0, 1, 2], [6, 7, 8], [21, 22]]


def test_the_last_partial_batch_compiles_nothing():
    made = inference()
    results(made, 6)
    with count_compilations() as compiled:
        results(made, 8)
    assert compiled.total == 0


def test_results_that_are_not_by_row_are_exact_too():
    found = [x.tolist() for _, x in results(inference(by_batch), 8)]
    assert found == [[3], [12 + 9], [13 + 30]]


def test_data_smaller_than_a_batch_is_all_there():
    assert [x.tolist() for _, x in results(inference(), 2)] == [[0, 1]]


def test_batches_without_results_are_left_out():
    def nothing(config, batch, state):
        return by_row(config, batch, state).replace(ret=None)

    assert results(inference(nothing), 8) == []


def test_a_flag_ends_it():
    flag = types.SimpleNamespace(is_set=lambda: True)
    with pytest.raises(InterruptedError):
        list(inference().results(None, batches(3), flag))


def test_what_breaks_the_contract_is_told_so():
    with pytest.raises(TypeError, match="infer_step must give its state"):
        results(inference(lambda config, batch, state: 1), 3)
    module = types.SimpleNamespace(get_infer_state=lambda config: {})
    with pytest.raises(TypeError, match=r"must give a tekoa\.estimator\.InferState"):
        Inference(module, None, None, batch_size=1)
    with pytest.raises(DataError, match=r"must give examples \(gold, batch\)"):
        list(pairs([{"x": 1}], "eval_data_fn"))


@pytest.mark.parametrize(
    ("trained_with", "evaluated_with", "total"),
    [(False, False, 0), (True, False, 6), (False, True, 6)],
)
def test_collections_of_training_are_read_on_request(
    tmp_path, caplog, trained_with, evaluated_with, total
):
    def get_train_state(config, rng):
        metrics = MeanMetrics.create("loss")
        return TrainState.create(
            metrics, optax.sgd(0.0), Model(), rng, jnp.zeros(3), save_mutable=trained_with
        )

    def train_step(config, batch, state, metrics):
        _, variables = state.apply_fn(state.variables(), batch, mutable=state.mutable())
        grads = jax.tree.map(jnp.zeros_like, state.params)
        return state.apply_gradients(grads=grads, _vars=variables), metrics

    module = types.SimpleNamespace(get_train_state=get_train_state, train_step=train_step)
    data = [np.float32([0, 1, 2]), np.float32([1, 1, 1])]
    training = OwnTraining(module, None, None, data=data, rng=jax.random.key(0))
    writer = files.CheckpointFileWriter(tmp_path)
    for checkpoint in TrainLoop(None, training, grads=False):
        writer(checkpoint)
    writer.close()
    with caplog.at_level(logging.INFO, "tekoa"):
        made = inference(save_mutable=evaluated_with)
        found = results(made, 3, str(tmp_path / "checkpoint_2"))
    assert found[0][1].tolist() == [total, total + 1, total + 2]
    assert ("memory start anew" in caplog.text) == (total == 0)
