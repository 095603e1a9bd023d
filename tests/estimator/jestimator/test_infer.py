import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa import sharding
from tekoa.data import DataError
from tekoa.estimator import InferState, MeanMetrics, TrainState
from tekoa.estimator.jestimator.infer import Inference, pairs
from tekoa.estimator.jestimator.train import OwnTraining
from tekoa.extensions import checkpoint_files
from tekoa.loop.train import TrainLoop
from tekoa.store import Store
from tekoa.testing import count_compilations


class Model(nn.Module):
    """Adds the sum of all earlier inputs to its input."""

    @nn.compact
    def __call__(self, x):
        total = self.variable("memory", "total", jnp.zeros, ())
        scale = self.param("scale", nn.initializers.ones, ())
        output = scale * x + total.value
        if not self.is_initializing():
            total.value = total.value + x.sum()
        return output


def by_row(config, batch, state):
    outputs, variables = state.apply_fn(state.variables(), batch, mutable=state.mutable())
    return state.replace(ret=outputs, _vars=variables)


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


def results(runner, n, path=None):
    return list(runner.results(path, batches(n), None))


def test_state_lasts_for_one_pass():
    runner = inference()
    for _ in range(2):
        extras, outputs = zip(*results(runner, 8), strict=True)
        assert extras == (0, 3, 6)
        assert [x.tolist() for x in outputs] == [[0, 1, 2], [6, 7, 8], [21, 22]]


def test_a_short_last_batch_compiles_nothing():
    runner = inference()
    results(runner, 6)
    with count_compilations() as compiled:
        results(runner, 8)
    assert compiled.total == 0


def test_results_that_are_not_one_per_row_are_exact():
    outputs = [x.tolist() for _, x in results(inference(by_batch), 8)]
    assert outputs == [[3], [12 + 9], [13 + 30]]


def test_data_smaller_than_a_batch_is_complete():
    assert [x.tolist() for _, x in results(inference(), 2)] == [[0, 1]]


def test_batches_without_results_are_skipped():
    def nothing(config, batch, state):
        return by_row(config, batch, state).replace(ret=None)

    assert results(inference(nothing), 8) == []


def test_the_stop_flag_interrupts():
    flag = types.SimpleNamespace(is_set=lambda: True)
    with pytest.raises(InterruptedError):
        list(inference().results(None, batches(3), flag))


def test_broken_contracts_are_reported():
    with pytest.raises(TypeError, match="infer_step must return its state"):
        results(inference(lambda config, batch, state: 1), 3)
    module = types.SimpleNamespace(get_infer_state=lambda config: {})
    with pytest.raises(TypeError, match=r"must return a tekoa\.estimator\.InferState"):
        Inference(module, None, None, batch_size=1)
    with pytest.raises(DataError, match=r"must return examples \(gold, batch\)"):
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
    training = OwnTraining(module, None, None, data=data)
    writer = checkpoint_files.CheckpointFileWriter(tmp_path)
    for checkpoint in TrainLoop(None, training):
        writer(checkpoint)
    writer.close()
    with caplog.at_level(logging.INFO, "tekoa"):
        runner = inference(save_mutable=evaluated_with)
        [(_, outputs)] = results(runner, 3, str(tmp_path / "checkpoint_2"))
    assert outputs.tolist() == [total, total + 1, total + 2]
    assert ("memory start from scratch" in caplog.text) == (total == 0)


class Wide(nn.Module):
    """A layer whose kernel can be split."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(24, name="wide")(x)


def wide_inference(layout):
    module = types.SimpleNamespace(
        get_infer_state=lambda config: InferState.create(Wide(), jnp.zeros((1, 7))),
        infer_step=lambda config, batch, state: state.replace(
            ret=state.apply_fn({"params": state.params}, batch)
        ),
    )
    return Inference(module, None, None, batch_size=4, layout=layout)


def n_split_kernels():
    """Counts the live arrays that have the shape of the kernel and are split over the model."""
    kernels = [x for x in jax.live_arrays() if x.shape == (7, 24)]
    return sum(getattr(x.sharding, "spec", None) == jax.P(None, "model") for x in kernels)


@pytest.mark.parametrize("stored", [False, True])
def test_a_mesh_splits_parameters_and_rows_and_changes_no_result(tmp_path, stored):
    layout = sharding.Layout(
        sharding.make_mesh(data=2, model=4), rules={"kernel": (None, "model"), ".*": ()}
    )
    path = None
    if stored:
        rng = np.random.default_rng(0)
        params = {"wide": {"kernel": rng.normal(size=(7, 24)), "bias": rng.normal(size=24)}}
        params = jax.tree.map(np.float32, params)
        with Store(tmp_path) as writer:
            writer.save(3, {"model_params": params})
        path = str(tmp_path / "checkpoint_3")
    x = np.random.default_rng(1).normal(size=(10, 7)).astype(np.float32)
    data = [(None, x[:4]), (None, x[4:8]), (None, x[8:])]
    alone = [out for _, out in wide_inference(None).results(path, data, None)]
    n_before = n_split_kernels()
    runner = wide_inference(layout)
    split = runner.results(path, data, None)
    first = next(split)[1]
    assert n_split_kernels() > n_before
    together = [first, *(out for _, out in split)]
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
