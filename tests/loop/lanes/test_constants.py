"""Constants that differ become inputs, wherever in a program they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.loop.lanes import constants


def in_call(k):
    @jax.jit
    def inner(x):
        return x * k

    return lambda x: inner(x) + 1


def in_scan(k):
    def step(carry, row):
        return carry * k + row, carry - k

    return lambda x: jax.lax.scan(step, jnp.zeros(()), x, reverse=True)


def in_while(k):
    return lambda x: jax.lax.while_loop(lambda c: c.sum() < 10 * k, lambda c: c + k, x)


def in_branch(k):
    return lambda x: jax.lax.cond(x[0] > 0, lambda x: x * k, lambda x: x - k, x)


def in_custom_rule(k):
    @jax.custom_jvp
    def scaled(x):
        return x * k

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * 2 * k))
    return jax.value_and_grad(lambda x: (scaled(x) + jax.checkpoint(lambda x: x**2 * k)(x)).sum())


def in_array(k):
    table = jnp.full(3, k)
    return lambda x: x + table


def in_result(k):
    return lambda x: (x, jnp.float32(k))


@pytest.mark.parametrize(
    "make", [in_call, in_scan, in_while, in_branch, in_custom_rule, in_array, in_result]
)
def test_merged_program_computes_what_each_program_computes(make):
    x = jnp.arange(3.0) + 0.5
    numbers = (0.5, 1.25, 3.0)
    programs = [constants.trace(make(k), x) for k in numbers]
    assert all(program.is_like(programs[0]) for program in programs)
    function, values = constants.merge(programs)
    merged = jax.jit(function)
    for k, own in zip(numbers, values, strict=True):
        expected, result = jax.jit(make(k))(x), merged(own, x)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
    assert merged._cache_size() == 1


def test_rates_of_optax_are_constants():
    params = {"w": jnp.ones(2)}
    rates = [optax.cosine_decay_schedule(rate, 10) for rate in (0.1, 0.2)]
    states = [optax.adamw(rate).init(params) for rate in rates]
    programs = [
        constants.trace(optax.adamw(rate).update, params, state, params)
        for rate, state in zip(rates, states, strict=True)
    ]
    _, values = constants.merge(programs)
    assert [[x.dtype.name, x.item()] for (x,) in values] == [
        ["float32", np.float32(rate)] for rate in (0.1, 0.2)
    ]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda x: x * 2, lambda x: x + 2),
        (lambda x: x**2, lambda x: x**3),
        (lambda x: jnp.zeros(2), lambda x: jnp.zeros(3)),
        (lambda x: x * 2, lambda x: x * 2 * 1.5),
        (lambda x: x[0] + x[1], lambda x: x[0] + x[2]),
        (lambda x: x.sum() - 1, lambda x: 1 - x.sum()),
    ],
)
def test_other_equations_are_not_alike(a, b):
    x = jnp.arange(3.0)
    assert not constants.trace(a, x).is_like(constants.trace(b, x))


def test_division_by_a_constant_has_the_bits_of_the_single_program():
    """XLA multiplies by the reciprocal of a constant, and divides by an input."""
    functions = [lambda x, c=c: jnp.minimum(1.0, x / c) for c in (127.0, 320.0)]
    programs = [constants.trace(function, jnp.float32(1)) for function in functions]
    merged, values = constants.merge(programs)
    merged = jax.jit(merged)
    for function, own in zip(functions, values, strict=True):
        for step in range(100):
            assert merged(own, jnp.float32(step)) == jax.jit(function)(jnp.float32(step))
