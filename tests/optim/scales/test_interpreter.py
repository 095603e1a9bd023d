"""The interpreter: results, dependencies, choice of rules, random draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales import interpreter, values
from tekoa.optim.scales import views as views_lib
from tekoa.optim.scales.values import Value


def reader(**kwargs):
    defaults = {
        "always": {},
        "on_views": {},
        "shapes_only": False,
        "tied_scales": {},
        "targets": {},
    }
    return interpreter.Reader(**(defaults | kwargs))


def value(array, deps=0, param=None):
    views = () if param is None else (views_lib.View.whole(param, array.shape),)
    return Value(shape=array.shape, dtype=array.dtype, data=array, deps=deps, views=views)


def test_without_parameters_results_are_those_of_jax():
    def fn(x, y):
        return jnp.sin(x) @ y + 3, jnp.sum(x > 0)

    x, y = np.ones((2, 3), np.float32), np.full((3, 2), 2.0, np.float32)
    outs = reader().run(jax.make_jaxpr(fn)(x, y), [value(x), value(y)])
    for out, expected in zip(outs, fn(x, y)):
        np.testing.assert_allclose(out.data, expected, rtol=1e-6)


def test_integers_depend_on_the_batch_but_not_on_parameters():
    def fn(x, w):
        return x * w, jnp.argmax(x * w)

    batch, param = values.BATCH, values.param_bit(0)
    x = np.ones(3, np.float32)
    product, index = reader().run(jax.make_jaxpr(fn)(x, x), [value(x, batch), value(x, param)])
    assert product.deps == batch | param
    assert index.deps == batch


def test_parameter_without_a_rule_is_noted_and_computed():
    x = np.array([3.0, 1.0, 2.0], np.float32)
    subject = reader()
    (out,) = subject.run(jax.make_jaxpr(jax.lax.sort)(x), [value(x, param=0)])
    np.testing.assert_array_equal(out.data, [1, 2, 3])
    assert subject.record.notes == {0: "used by 'sort', for which there is no rule"}


def test_rule_is_chosen_by_the_primitive_and_only_for_parameters():
    primitives = []

    def rule(subject, eqn, inputs):
        primitives.append(eqn.primitive.name)
        return subject.plain(eqn, inputs)

    x = np.ones(3, np.float32)
    subject = reader(on_views={"sin": rule})
    jaxpr = jax.make_jaxpr(lambda w, x: (jnp.sin(w), jnp.sin(x)))(x, x)
    subject.run(jaxpr, [value(x, param=0), value(x)])
    assert primitives == ["sin"]


def test_draws_do_not_depend_on_the_memory_layout():
    kernel = np.zeros((3, 4), np.float32)
    draw = reader().normal(value(kernel, param=0), (0, 1))
    transposed = reader().normal(value(kernel.T, param=7), (1, 0))
    np.testing.assert_array_equal(draw, transposed.T)


def test_drawn_features_come_in_pairs_of_opposite_sign():
    drawn = reader().normal(value(np.zeros((50, 6), np.float32), param=0), (0, 1))
    np.testing.assert_allclose(drawn.sum(-1), 0, atol=1e-5)
    assert np.mean(drawn**2) == pytest.approx(1, rel=0.2)


def test_draws_repeat_along_batch_axes():
    drawn = reader().normal(value(np.zeros((2, 3, 4), np.float32), param=0), (0, 1, 2), n_batch=1)
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_constants_of_the_model_are_used():
    table = np.arange(4.0, dtype=np.float32)
    (out,) = reader().run(jax.make_jaxpr(lambda x: x + table)(table), [value(table)])
    np.testing.assert_array_equal(out.data, 2 * table)
