"""Equations in NumPy against the same equations in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.optim.scales import eager, find

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4)).astype(np.float32)
Y = RNG.normal(size=(3, 4)).astype(np.float32)
IDS = RNG.integers(-5, 5, (3, 4)).astype(np.int32)
MASK = X > 0
X17 = np.ones((4, 17), np.float32)

lax = jax.lax
CASES = {
    **{f"{fn.__name__} of floats": (fn, (X, Y)) for fn in (lax.add, lax.sub, lax.mul, lax.div)},
    **{f"{fn.__name__} of integers": (fn, (IDS, IDS + 7)) for fn in (lax.add, lax.mul)},
    **{fn.__name__: (fn, (X, Y)) for fn in (lax.max, lax.min, lax.lt, lax.le, lax.gt, lax.ge)},
    **{fn.__name__: (fn, (IDS, IDS[::-1].copy())) for fn in (lax.eq, lax.ne)},
    **{fn.__name__: (fn, (X,)) for fn in (lax.abs, lax.exp, lax.expm1, lax.sign, lax.tanh)},
    **{fn.__name__: (fn, (np.abs(X),)) for fn in (lax.log, lax.log1p, lax.sqrt, lax.rsqrt)},
    **{fn.__name__: (fn, (X,)) for fn in (lax.neg, lax.square, lax.logistic, lax.is_finite)},
    **{fn.__name__: (fn, (MASK, MASK[::-1].copy())) for fn in (lax.bitwise_and, lax.bitwise_or)},
    "not": (lax.bitwise_not, (MASK,)),
    "not of integers": (lax.bitwise_not, (IDS,)),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), (X,)),
    "negative integer_pow": (lambda x: lax.integer_pow(x, -2), (X,)),
    "select": (lax.select_n, (MASK, X, Y)),
    "select of three": (lax.select_n, (IDS % 3, X, Y, X + Y)),
    "select by one number": (lax.select_n, (np.asarray(True), X, Y)),
    "to integers": (lambda x: lax.convert_element_type(x, np.int32), (3 * X,)),
    "to floats": (lambda x: lax.convert_element_type(x, np.float32), (IDS,)),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (2, 3, 5, 4), (1, 3)), (X,)),
    "broadcast of 1": (lambda x: lax.broadcast_in_dim(x, (3, 5), (0, 1)), (X[:, :1],)),
    "reshape": (lambda x: lax.reshape(x, (2, 6)), (X,)),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), (X,)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (X[:, :1],)),
    "slice": (lambda x: lax.slice(x, (0, 1), (3, 4), (2, 1)), (X,)),
    "slice without strides": (lambda x: lax.slice(x, (1, 1), (2, 4)), (X,)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, Y)),
    "sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), (X,)),
    "sum of integers": (lambda x: jnp.sum(x, axis=1), (IDS,)),
    "max along an axis": (lambda x: lax.reduce_max_p.bind(x, axes=(1,), out_sharding=None), (X,)),
    "min": (lambda x: lax.reduce_min_p.bind(x, axes=(0, 1), out_sharding=None), (X,)),
}


@pytest.mark.parametrize("name", CASES)
def test_equation_equals_jax(name):
    fn, inputs = CASES[name]
    (eqn,) = jax.make_jaxpr(fn)(*inputs).eqns
    (found,) = eager.execute(eqn, inputs)
    expected = np.asarray(fn(*inputs))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (lax.div, (IDS, IDS[::-1].copy())),  # Rounds towards 0.
        (lax.add, (X.astype(jnp.bfloat16), X.astype(jnp.bfloat16))),
        (lax.add, (X.astype(np.float16), X.astype(np.float16))),
        (lax.erf, (X,)),
    ],
)
def test_everything_else_is_left_to_jax(fn, inputs):
    (eqn,) = jax.make_jaxpr(fn)(*inputs).eqns
    assert eager.execute(eqn, inputs) is None


def test_keys_and_short_floats_stay_arrays_of_jax():
    assert isinstance(eager.as_numpy(jnp.ones(3)), np.ndarray)
    for x in (jax.random.key(0), jnp.ones(3, jnp.bfloat16)):
        assert eager.as_numpy(x) is x


def test_reading_a_common_model_computes_only_products_in_jax(monkeypatch):
    def fn(p, x):
        x = jax.nn.relu(x @ p["a"] + p["bias"])
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["gain"]
        return jnp.mean(jax.nn.log_softmax(x @ p["b"])[:, 0])

    shapes = {"a": (17, 5), "b": (5, 3), "bias": (5,), "gain": (5,)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    jaxpr = jax.make_jaxpr(fn)(params, X17)
    computed = []
    execute = eager.execute

    def watched(eqn, data):
        outs = execute(eqn, data)
        if outs is None:
            computed.append(eqn.primitive.name)
        return outs

    monkeypatch.setattr(eager, "execute", watched)
    find.find_rows(jaxpr, [(name,) for name in shapes], jax.tree.leaves(params), [X17])
    assert set(computed) <= {"dot_general", "stop_gradient"}
