import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tekoa.bridges import nnx as bridge
from tekoa.core import trees
from tekoa.testing import assert_trees_equal

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
RNG = jax.random.key(0)


class Net(nnx.Module):
    def __init__(self, rngs, n_layers=1):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(n_layers)])
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.out(self.drop(self.norm(x)))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.b = self.a
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.b(self.a(x)))


class Counter(nnx.Module):
    """Counts its calls in a carry, one entry per row."""

    def __init__(self, rngs):
        self.out = nnx.Linear(8, 3, rngs=rngs)
        self.n = bridge.Carry(jnp.zeros(16))

    def __call__(self, x):
        self.n[...] += 1
        return self.out(x) + self.n[...][:, None]


def test_parameters_are_named_as_in_other_libraries():
    params, variables = bridge.model_fns(Net(nnx.Rngs(0), 11)).init(RNG, (X,))
    names = trees.flatten_named(params)
    assert {"layers/0/kernel", "layers/10/bias", "norm/scale", "out/kernel"} <= set(names)
    assert all(isinstance(leaf, jax.Array) for leaf in names.values())
    assert {"state/norm/mean", "state/norm/var"} <= set(trees.flatten_named(variables))


def test_parameters_stay_in_order_past_ten_layers():
    module = Net(nnx.Rngs(0), 11)
    fns = bridge.model_fns(module)
    params, variables = fns.init(RNG, (X,))
    for i, layer in enumerate(module.layers):
        np.testing.assert_array_equal(params["layers"][i]["kernel"], layer.kernel[...])
    assert_trees_equal(nnx.to_pure_dict(nnx.state(fns.merge(params, variables), nnx.Param)), params)


def test_training_updates_statistics_and_random_streams(train):
    state, losses = train(bridge.model_fns(Net(nnx.Rngs(0))), 3)
    variables = trees.flatten_named(state.variables)
    assert variables["state/norm/mean"].any()
    assert int(variables["state/drop/rngs/count"]) == 3
    assert losses == train(bridge.model_fns(Net(nnx.Rngs(0))), 3)[1]


def test_a_skipped_step_does_not_advance_random_streams(train):
    bad = [(np.full_like(X, np.nan), X[:, :3])]
    state, _ = train(bridge.model_fns(Net(nnx.Rngs(0))), 2, on_nan="skip", data=bad)
    variables = trees.flatten_named(state.variables)
    assert int(variables["state/drop/rngs/count"]) == 0
    assert np.isfinite(variables["state/norm/mean"]).all()


def test_evaluation_has_no_dropout_and_changes_no_statistics():
    fns = bridge.model_fns(Net(nnx.Rngs(0)))
    params, variables = fns.init(RNG, (X,))
    a, changed = fns.apply(params, variables, (X,), rng=RNG, train=False)
    b, _ = fns.apply(params, changed, (X,), rng=RNG, train=False)
    np.testing.assert_array_equal(a, b)
    assert_trees_equal(changed["state"]["norm"], variables["state"]["norm"])


def test_the_original_module_is_unchanged_and_the_merged_one_is_trained(train):
    module = Net(nnx.Rngs(0))
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    fns = bridge.model_fns(module)
    state, _ = train(fns, 2)
    assert_trees_equal(nnx.to_pure_dict(nnx.state(module, nnx.Param)), before)
    merged = fns.merge(state.params, state.variables)
    assert isinstance(merged, Net)
    assert_trees_equal(nnx.to_pure_dict(nnx.state(merged, nnx.Param)), state.params)


def test_tied_weights_are_one_parameter_and_stay_tied(train):
    fns = bridge.model_fns(Tied(nnx.Rngs(0)))
    state, _ = train(fns, 2)
    assert sorted(trees.flatten_named(state.params)) == ["a/kernel", "out/bias", "out/kernel"]
    merged = fns.merge(state.params, state.variables)
    assert merged.a is merged.b


def test_a_carry_is_passed_from_batch_to_batch(train):
    state, _ = train(bridge.model_fns(Counter(nnx.Rngs(0))), 3)
    np.testing.assert_array_equal(state.carry["n"], np.full(16, 3.0))


def test_variables_created_in_the_call_are_refused():
    class Growing(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            self.extra = nnx.BatchStat(jnp.zeros(2))
            return self.out(x)

    fns = bridge.model_fns(Growing(nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"adds or removes the variables \['extra'\]"):
        fns.apply(*fns.init(RNG, (X,)), (X,), rng=RNG, train=True)


def test_intermediates_are_dropped(train):
    class Recording(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            self.hidden = nnx.Intermediate(x)
            return self.out(x)

    state, _ = train(bridge.model_fns(Recording(nnx.Rngs(0))), 2)
    assert state.variables == {}
