"""Optimizers written out as plain code take the same steps."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.optimizers import WATCHED, plain_optimizer
from tekoa.estimator.eject.watch import Watch
from tekoa.optim import named, sphere
from tekoa.optim.amos import transform
from tekoa.optim.scales.auto import scales_of_function

PARAMS = {
    "a": jnp.ones((3, 4, 5)),
    "b": jnp.linspace(0.0, 1.0, 5),
    "c": jnp.ones((5, 2)),
}


def loss(params, x):
    for kernel in params["a"][:, :, :4]:
        x = jnp.tanh(x @ kernel)
    return jnp.sum((x @ params["a"][0] + params["b"]) @ params["c"])


def check_same_steps(make):
    with Watch(functions=WATCHED) as watch:
        tx = make()
    plain = plain_optimizer(watch, PARAMS)
    names = {"jax": jax, "jnp": jnp, "optax": optax, "collections": collections}
    exec(plain.code, names)
    other = eval(plain.call, names)
    rng = np.random.default_rng(0)
    states, params = [tx.init(PARAMS), other.init(PARAMS)], [PARAMS, PARAMS]
    for _ in range(4):
        grads = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), PARAMS)
        for i, t in enumerate((tx, other)):
            updates, states[i] = jax.jit(t.update)(grads, states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
        for a, b in zip(*map(jax.tree.leaves, params), strict=True):
            np.testing.assert_array_equal(a, b)


# A change of sphere must be followed by the plain form of it: pieces.sphere.
@pytest.mark.parametrize("settings", [*sphere.RULES.values(), {"nesterov": False}, {"c": 2.0}])
@pytest.mark.parametrize("n_steps", [20, None])
def test_sphere(settings, n_steps):
    table = scales_of_function(loss, PARAMS, jnp.ones((2, 4)))
    if n_steps is None:
        settings = {k: v for k, v in settings.items() if k != "tail"}
    check_same_steps(lambda: sphere.auto_sphere(table, n_steps=n_steps, **settings))


def test_sphere_with_other_slots_is_refused():
    table = scales_of_function(loss, PARAMS, jnp.ones((2, 4)))
    with pytest.raises(UsageError, match="is_reduced"):
        check_same_steps(lambda: sphere.sphere(table, n_steps=5, is_reduced=True))


def test_optimizer_of_optax_by_name():
    check_same_steps(lambda: named.choose("adamw", lambda: None, n_steps=3).optimizer)


def test_amos_has_numbers_instead_of_formulas():
    with Watch(functions=WATCHED) as watch:
        transform.amos(
            0.1, lambda name, shape: shape[0] ** -0.5, lambda name, shape: (1,) * len(shape)
        )
    plain = plain_optimizer(watch, PARAMS)
    assert f'"a": ({3**-0.5!r}, (1, 1, 1))' in plain.code
    assert plain.call is None
