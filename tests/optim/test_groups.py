import warnings

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
from tekoa.core import rules
from tekoa.optim import groups, rates
from tekoa.optim.amos import transform
from tekoa.testing import assert_trees_equal

PARAMS = {
    "encoder": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "head": {"kernel": jnp.ones((3, 1)), "bias": jnp.ones(1)},
}


def one_step(tx, params=PARAMS, grads=None):
    grads = jax.tree.map(jnp.ones_like, params) if grads is None else grads
    return tx.update(grads, tx.init(params), params)


def test_each_group_gets_its_own_transformation_and_the_first_match_wins():
    tx = groups.param_groups(
        {"head": optax.sgd(0.1), "kernel$": optax.sgd(0.2), ".*": optax.sgd(0.3)}
    )
    updates, _ = one_step(tx)
    steps = jax.tree.map(lambda u: round(float(-u.ravel()[0]), 6), updates)
    assert steps == {"encoder": {"kernel": 0.2, "bias": 0.3}, "head": {"kernel": 0.1, "bias": 0.1}}


@pytest.mark.parametrize("value", [None, "freeze", optax.set_to_zero(), rates.freeze()])
def test_frozen_group_does_not_change_and_has_no_slots(value):
    tx = groups.param_groups({"^encoder": value, ".*": optax.adam(0.1)})
    updates, state = one_step(tx)
    assert not any(x.any() for x in jax.tree.leaves(updates["encoder"]))
    assert all(x.all() for x in jax.tree.leaves(updates["head"]))
    assert not jax.tree.leaves(state.inner_states["^encoder"])


def test_nan_gradients_of_a_frozen_group_are_ignored():
    grads = {
        "encoder": jax.tree.map(lambda x: x * np.nan, PARAMS["encoder"]),
        "head": PARAMS["head"],
    }
    updates, _ = one_step(groups.param_groups({"^enc": None, ".*": optax.adam(0.1)}), grads=grads)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(updates))


def test_parameters_in_no_group_are_named():
    with pytest.raises(rules.NoRuleError, match="'encoder/bias', 'head/bias'"):
        groups.param_groups({"kernel$": optax.sgd(0.1)}).init(PARAMS)


def test_unused_patterns_warn_and_training_continues():
    tx = groups.param_groups({"kernal$": optax.sgd(9.0), ".*": optax.sgd(0.1), "bias$": None})
    with pytest.warns(groups.UnusedRuleWarning, match=r"'kernal\$', 'bias\$'"):
        state = tx.init(PARAMS)
    updates, _ = tx.update(PARAMS, state, PARAMS)
    np.testing.assert_allclose(updates["head"]["kernel"], -0.1, rtol=1e-6)


def test_a_tree_without_parameters_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups.param_groups({"a": None, "b": optax.adam(0.1)}).init({})


@pytest.mark.parametrize("value", ["frozen", 0.1, optax.sgd, {}])
def test_invalid_value_error_names_the_group(value):
    with pytest.raises(TypeError, match=r"'bias\$'"):
        groups.param_groups({"bias$": value})


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="head")(nn.Dense(3, name="encoder")(x))


class NnxModel(nnx.Module):
    def __init__(self):
        self.encoder = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(3, 1, rngs=nnx.Rngs(0))


class Layer(eqx.Module):
    kernel: jax.Array
    bias: jax.Array


class EquinoxModel(eqx.Module):
    encoder: Layer
    head: Layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: PARAMS,
        lambda: LinenModel().init(jax.random.key(0), jnp.ones((1, 2)))["params"],
        lambda: nnx.state(NnxModel(), nnx.Param),
        lambda: nnx.as_pure(nnx.state(NnxModel(), nnx.Param)),
        lambda: EquinoxModel(Layer(*PARAMS["encoder"].values()), Layer(*PARAMS["head"].values())),
    ],
    ids=["dict", "linen", "nnx_state", "nnx_pure", "equinox"],
)
def test_one_table_works_for_every_framework(make):
    params = make()
    tx = groups.param_groups(
        {"^encoder/": "freeze", "bias$": optax.sgd(0.5), "kernel$": optax.sgd(0.25)}
    )
    updates, _ = one_step(tx, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    by_size = {x.size: float(x.ravel()[0]) for x in jax.tree.leaves(updates)}
    sizes = {"encoder kernel": 6, "head bias": 1}
    assert by_size[sizes["encoder kernel"]] == 0.0
    assert by_size[sizes["head bias"]] == -0.5
    head_kernel = [x for x in jax.tree.leaves(updates) if x.shape == (3, 1)]
    assert float(head_kernel[0][0, 0]) == -0.25


@pytest.mark.parametrize("value", [0.1, np.float32(0.1), optax.constant_schedule(0.1)])
def test_rates_in_a_table_need_make(value):
    table = {"^head": value, "bias$": None, ".*": optax.sgd(0.2)}
    updates, state = one_step(groups.param_groups(table, make=optax.sgd))
    steps = jax.tree.map(lambda u: round(float(-u.ravel()[0]), 6), updates)
    assert steps == {"encoder": {"kernel": 0.2, "bias": 0}, "head": {"kernel": 0.1, "bias": 0.1}}
    assert rates_of(state) == {"^head": pytest.approx(0.1), "bias$": 0.0}
    with pytest.raises(TypeError, match=r"'\^head'.*make=optax.adam"):
        groups.param_groups(table)


def test_a_group_without_a_readable_rate_is_logged(caplog):
    caplog.set_level("INFO", "tekoa")
    one_step(groups.param_groups({"^head": optax.adam(0.1), ".*": rates.rated(optax.adam, 0.1)}))
    assert "The learning rate of group '^head' is not logged" in caplog.text


def quadratic(params):
    flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(params)])
    return jnp.sum((flat - jnp.arange(1, flat.size + 1)) ** 2 * jnp.arange(1, flat.size + 1))


def test_a_line_search_varies_only_its_own_group():
    """LBFGS on a group is LBFGS on a function of that group alone."""

    def steps(tx, params, value_fn):
        def step(carry, _):
            params, state = carry
            value, grad = jax.value_and_grad(value_fn)(params)
            updates, state = tx.update(
                grad, state, params, value=value, grad=grad, value_fn=value_fn
            )
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(lambda c: jax.lax.scan(step, c, None, 8)[0])((params, tx.init(params)))[0]

    alone = steps(optax.lbfgs(), PARAMS["head"], lambda head: quadratic({**PARAMS, "head": head}))
    grouped = steps(groups.param_groups({"^head": optax.lbfgs(), ".*": None}), PARAMS, quadratic)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), grouped["head"], alone)
    assert_trees_equal(grouped["encoder"], PARAMS["encoder"])
    # The head's minimum: entries 10 to 13 of the target.
    np.testing.assert_allclose(grouped["head"]["bias"], [10.0], rtol=1e-3)


def test_mask_applies_decay_to_the_named_parameters_only():
    decay = groups.mask_by_name({"bias$": False, "^head": False, ".*": True})
    tx = optax.adamw(0.1, weight_decay=0.5, mask=decay)
    updates, _ = one_step(tx, grads=jax.tree.map(jnp.zeros_like, PARAMS))
    np.testing.assert_allclose(updates["encoder"]["kernel"], -0.05, rtol=1e-6)
    assert not updates["encoder"]["bias"].any()
    assert not updates["head"]["kernel"].any()


def test_mask_works_inside_a_group():
    adamw = optax.adamw(
        0.1, weight_decay=0.5, mask=groups.mask_by_name({"bias$": False, ".*": True})
    )
    tx = groups.param_groups({"^head": None, ".*": adamw})
    updates, _ = one_step(tx, grads=jax.tree.map(jnp.zeros_like, PARAMS))
    np.testing.assert_allclose(updates["encoder"]["kernel"], -0.05, rtol=1e-6)
    assert not updates["encoder"]["bias"].any()


def test_amos_sees_full_names_inside_a_group():
    names = set()
    tx = groups.param_groups(
        {"kernel$": transform.amos(0.1, lambda name, shape: names.add(name) or 1.0), ".*": None}
    )
    one_step(tx)
    assert names == {("encoder", "kernel"), ("head", "kernel")}


def rates_of(state):
    return {group: float(rate) for group, rate in rates.current_rates(state).items()}


def test_a_group_may_use_multi_steps():
    tx = groups.param_groups({"kernel$": optax.MultiSteps(optax.sgd(0.5), 2), ".*": None})
    state = tx.init(PARAMS)
    first, state = tx.update(PARAMS, state, PARAMS)
    second, state = tx.update(PARAMS, state, PARAMS)
    assert not first["head"]["kernel"].any()
    np.testing.assert_array_equal(second["head"]["kernel"], -0.5)


def test_extra_arguments_reach_the_groups():
    plateau = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    tx = groups.param_groups({"head": plateau, ".*": None})
    state = tx.init(PARAMS)
    for _ in range(4):
        updates, state = tx.update(PARAMS, state, PARAMS, value=1.0)
    assert -1.0 < float(updates["head"]["bias"][0]) < 0


def test_group_state_is_restored_exactly():
    tx = groups.param_groups({"/bias$": rates.rated(optax.adam, 0.1), "kernel$": optax.adam(0.2)})
    _, state = one_step(tx)
    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(tx.init(PARAMS), data)
    assert_trees_equal(restored, state)


def test_former_names_are_aliases():
    assert tekoa.groups is groups.groups is tekoa.param_groups is groups.param_groups
    assert tekoa.mask is groups.mask is tekoa.mask_by_name is groups.mask_by_name
