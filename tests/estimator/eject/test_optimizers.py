"""Optimizers written as code take the same steps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest
from test_plain import PARAMS, check_same_steps

import tekoa
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.optimizers import PlainOptimizer
from tekoa.estimator.eject.source import Code
from tekoa.optim import named, sphere
from tekoa.optim.scales.auto import scales_of_function


def loss(params, x):
    for i in range(3):
        x = jnp.tanh(x @ params[f"kernel_{i}"])
    return jnp.sum((x + params["b"]) @ params["c"])


# The second kernel is orthogonalised in two blocks.
SHAPES = {"kernel_0": (4, 70), "kernel_1": (70, 70), "kernel_2": (70, 4), "b": (4,), "c": (4, 2)}
NETWORK = {name: jnp.ones(shape) for name, shape in SHAPES.items()}


def code_of(tx, params=PARAMS):
    plain = PlainOptimizer(Code(plain_model), params, is_single_cpu=False)
    expression = plain.expression(tx)
    return [*plain._code.blocks.values(), *plain.blocks], expression


def rebuilt(tx, params=PARAMS):
    blocks, expression = code_of(tx, params)
    names = {"functools": functools, "math": math, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
    exec("\n".join(blocks), names)
    return eval(expression, names)


@pytest.mark.parametrize("n_steps", [20, None])
def test_auto(n_steps):
    table = scales_of_function(loss, NETWORK, jnp.ones((2, 4)))
    tx = sphere.auto_sphere(table, n_steps=n_steps)
    check_same_steps(tx, rebuilt(tx, NETWORK), NETWORK)


def test_what_is_not_done_for_these_parameters_is_left_out():
    def output_of(params, x):
        return jnp.sum((jnp.tanh(x @ params["a"]) if "a" in params else x) @ params["c"])

    def code_for(**shapes):
        params = {name: jnp.ones(shape) for name, shape in shapes.items()}
        x = jnp.ones((2, *shapes.get("a", shapes["c"])[:1]))
        table = scales_of_function(output_of, params, x)
        return "\n".join(code_of(sphere.auto_sphere(table, n_steps=5), params)[0])

    assert "orthogonalised(" not in code_for(c=(4, 2))
    assert "jnp.pad" not in code_for(a=(4, 70), c=(70, 2))
    assert "jnp.pad" in code_for(a=(67, 70), c=(70, 2))
    tx = tekoa.amos(0.1, lambda name, shape: 0.5, lambda name, shape: (1,) * len(shape))
    assert "first = p + delta" not in "\n".join(code_of(tx)[0])


def test_sphere_with_other_slots_is_refused():
    table = scales_of_function(loss, NETWORK, jnp.ones((2, 4)))
    with pytest.raises(UsageError, match="is_reduced"):
        code_of(sphere.sphere(table, n_steps=5, is_reduced=True), NETWORK)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(0.1, weight_decay=0.3),
        optax.sgd(0.1, momentum=0.9, nesterov=True),
        optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
        tekoa.amos(0.1, lambda name, shape: 0.5, momentum=0.9, clip_value=2.0),
    ],
    ids=["adamw", "sgd", "clip", "schedule", "amos"],
)
def test_chains_are_read_off_their_functions(tx):
    check_same_steps(tx, rebuilt(tx))


def test_optimizer_by_name_keeps_its_name():
    tx = named.NamedOptimizer("adamw", 0.25)
    tx.resolve(lambda: None, n_steps=3)
    assert code_of(tx) == ([], "optax.adamw(learning_rate=0.25)")


@pytest.mark.parametrize("name", ["lbfgs", "momo", "polyak_sgd", "sophia"])
def test_optimizer_by_name_that_needs_the_loss_is_refused(name):
    tx = named.NamedOptimizer(name)
    tx.resolve(lambda: None, n_steps=3)
    with pytest.raises(UsageError, match=f"'{name}' needs the loss in each step"):
        code_of(tx)


def test_amos_has_numbers_instead_of_formulas():
    tx = tekoa.amos(
        0.1, lambda name, shape: shape[0] ** -0.5, lambda name, shape: (1,) * len(shape)
    )
    blocks, expression = code_of(tx)
    assert f'"a": ({3**-0.5!r}, (1, 1, 1))' in blocks[-1]
    assert expression == "amos(lambda step: 0.1, 0.999, SCALES, False)"


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.lbfgs(), "cannot be ejected"),
        (optax.inject_hyperparams(optax.adam)(0.1), "cannot be ejected"),
        (tekoa.amos(0.1, lambda name, shape: 0.5, extra_l2=0.1), "extra_l2"),
    ],
)
def test_others_are_refused(tx, message):
    with pytest.raises(UsageError, match=message):
        code_of(tx)
