import equinox as eqx
import jax
import numpy as np
import pytest

from tekoa.bridges import equinox as bridge
from tekoa.core import trees

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
RNG = jax.random.key(0)


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", momentum=0.5, mode="batch")
        self.out = eqx.nn.Linear(8, 3, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.out(x), state


class Dropping(eqx.Module):
    out: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.out, self.drop = eqx.nn.Linear(8, 3, key=key), eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        return self.drop(self.out(x), key=key)


def test_a_module_is_vmapped_over_the_batch():
    module = eqx.nn.MLP(8, 3, 4, 1, key=RNG)
    fns = bridge.model_fns(module)
    params, variables = fns.init(RNG, (X,))
    outputs, _ = fns.apply(params, variables, (X,), rng=RNG, train=True)
    np.testing.assert_allclose(outputs[5], module(X[5]), rtol=1e-5, atol=1e-6)
    assert "layers/0/weight" in trees.flatten_named(params)


def test_a_module_for_batches_is_told_that_it_receives_rows():
    class Batched(eqx.Module):
        out: eqx.nn.Linear

        def __call__(self, x):
            return jax.vmap(self.out)(x)

    fns = bridge.model_fns(Batched(eqx.nn.Linear(8, 3, key=RNG)))
    with pytest.raises(ValueError, match=r"ndim|rank|vmap") as error:
        fns.apply(*fns.init(RNG, (X,)), (X,), rng=RNG, train=True)
    assert "called with one row" in error.value.__notes__[-1]


def test_statistics_change_in_training_only(train):
    fns = bridge.model_fns(eqx.nn.make_with_state(Normed)(RNG))
    params, variables = fns.init(RNG, (X,))
    _, changed = fns.apply(params, variables, (X,), rng=RNG, train=True)
    has_changed = [
        not np.array_equal(a, b) for a, b in zip(variables["state"], changed["state"], strict=True)
    ]
    assert any(has_changed)
    assert fns.apply(params, variables, (X,), rng=RNG, train=False)[1] == {}
    state, losses = train(fns, 30)
    assert losses[-1] < losses[0]
    module, _ = fns.merge(state.params, state.variables)
    assert isinstance(module, Normed)


def test_dropout_differs_by_row_and_is_off_in_evaluation():
    fns = bridge.model_fns(Dropping(RNG))
    params, variables = fns.init(RNG, (X,))
    dropped, _ = fns.apply(params, variables, (X,), rng=RNG, train=True)
    zeros = np.asarray(dropped) == 0
    assert zeros.any()
    assert len(np.unique(zeros, axis=0)) > 1
    evaluated, _ = fns.apply(params, variables, (X,), rng=RNG, train=False)
    assert not (np.asarray(evaluated) == 0).any()


def test_merge_returns_the_trained_module(train):
    module = eqx.nn.MLP(8, 3, 4, 1, key=RNG)
    fns = bridge.model_fns(module)
    state, _ = train(fns, 2)
    merged = fns.merge(state.params, state.variables)
    assert isinstance(merged, eqx.nn.MLP)
    np.testing.assert_array_equal(merged.layers[0].weight, state.params["layers"]["0"]["weight"])
    assert not np.array_equal(merged.layers[0].weight, module.layers[0].weight)
