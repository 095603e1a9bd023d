import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support import files
from tekoa.core import trees
from tekoa.optim.amos import transform as amos_lib

FIXTURES = files.GOLDEN / "amos"
META = json.loads((FIXTURES / "amos_meta.json").read_text())
CONFIGS = sorted(META["configs"])


def golden(config):
    """Returns the transformation of a recorded run, its trees by kind, and its length."""
    meta = META["configs"][config]
    arrays = np.load(FIXTURES / f"amos_{config}.npz")
    kwargs = {k: v for k, v in meta["kwargs"].items() if not isinstance(v, str)}
    if isinstance(meta["kwargs"]["learning_rate"], str):
        kwargs["learning_rate"] = lambda count: 0.1 * jnp.minimum(1.0, count / 8)
    if "shape_fn" in meta["kwargs"]:
        kwargs["shape_fn"] = lambda name, shape: tuple(meta["slot_shapes"]["/".join(name)])
    tx = amos_lib.amos(eta_fn=lambda name, shape: meta["eta"]["/".join(name)], **kwargs)

    def tree(kind, index=None):
        flat = {key.split("/", 1)[1]: arrays[key] for key in arrays.files if key.startswith(kind)}
        flat = {k: v if index is None else v[index] for k, v in flat.items()}
        if meta["wrap"] == "list":
            return {
                "layers": [flat["layers/0"], flat["layers/1"]],
                "pair": (flat["pair/0"], flat["pair/1"]),
            }
        return trees.nest({tuple(key.split("/")): value for key, value in flat.items()})

    return tx, tree, len(arrays["count"])


def assert_close(actual, expected):
    actual, expected = trees.flatten_named(actual), trees.flatten_named(expected)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def amos_state(state):
    is_amos = lambda x: isinstance(x, amos_lib.ScaleByAmosState)
    return next(x for x in jax.tree.leaves(state, is_leaf=is_amos) if is_amos(x))


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "op_by_op"])
@pytest.mark.parametrize("config", CONFIGS)
def test_golden_trajectory_is_reproduced(config, jit):
    tx, tree, n_steps = golden(config)
    params = tree("init")
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for i in range(n_steps):
        updates, state = update(tree("grad", i), state, params)
        params = optax.apply_updates(params, updates)
        assert_close(updates, tree("update", i))
        assert_close(params, tree("param", i))
        assert_close(amos_state(state).v, tree("v", i))
        assert_close(amos_state(state).b, tree("b", i))
        assert amos_state(state).count == i + 1


def test_one_step_equals_hand_arithmetic():
    # theta 2, g 3, xi 0.25, eta 0.5, beta 0.75: v = 0.25*9, r = 0.25/2.25, gamma = xi^2*r*9.
    tx = amos_lib.amos(0.25, lambda name, shape: 0.5, beta=0.75)
    state = tx.init(jnp.float32(2.0))
    updates, state = tx.update(jnp.float32(3.0), state, jnp.float32(2.0))
    gamma = 0.0625 * (0.25 / 2.25) * 9
    expected = -0.5 * gamma * 2 - 0.25 * 0.5 * (0.25 / 2.25) ** 0.5 * 3
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    np.testing.assert_allclose(state.v, 2.25, rtol=1e-6)
    np.testing.assert_allclose(state.b, gamma, rtol=1e-6)


def test_lower_rank_slot_means_leading_axes_are_reduced():
    g = jax.random.normal(jax.random.key(0), (6, 4))
    slots = {}
    for shape in [(4,), (1, 4)]:
        tx = amos_lib.amos(0.1, lambda name, s: 1.0, lambda name, s, shape=shape: shape)
        _, state = tx.update(g, tx.init(g), g)
        assert state.v.shape == shape
        slots[shape] = np.ravel(state.v)
    np.testing.assert_array_equal(slots[4,], slots[1, 4])


def test_bfloat16_keeps_float32_slots_that_do_not_stall():
    params = jnp.ones((4,), jnp.bfloat16)
    tx = amos_lib.amos(1e-3, lambda name, shape: np.float64(1.0), beta=0.999)
    state = tx.init(params)
    one = jnp.ones((4,), jnp.bfloat16)
    updates, state = jax.jit(tx.update)(one, state, params)
    assert updates.dtype == jnp.bfloat16
    assert state.v.dtype == state.b.dtype == jnp.float32
    _, state = jax.lax.fori_loop(
        0, 5999, lambda _, carry: tx.update(one, carry[1], params), (updates, state)
    )
    np.testing.assert_allclose(state.v, 1 - 0.999**6000, rtol=1e-3)  # 0.9975


def test_eta_may_vary_within_a_parameter():
    params = jnp.ones((3, 2))
    rows = np.float32([[0.1], [1.0], [10.0]])
    tx = amos_lib.amos(0.1, lambda name, shape: rows)
    updates, _ = tx.update(jnp.ones((3, 2)), tx.init(params), params)
    for i, eta in enumerate([0.1, 1.0, 10.0]):
        tx = amos_lib.amos(0.1, lambda name, shape, eta=eta: eta)
        alone, _ = tx.update(jnp.ones(2), tx.init(params[0]), params[0])
        np.testing.assert_allclose(updates[i], alone, rtol=1e-6)


def test_eta_fn_may_compute_with_jnp_under_jit():
    tx = amos_lib.amos(0.1, lambda name, shape: jnp.sqrt(1 / shape[0]))
    params = jnp.ones((4, 2))
    jax.jit(lambda p: tx.update(p, tx.init(p), p))(params)


def test_parameters_without_gradient_stay_unchanged():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    tx = amos_lib.scale_by_amos(0.1, lambda name, shape: 1.0)
    updates, state = tx.update({"a": jnp.ones(2), "b": None}, tx.init(params), params)
    assert updates["b"] is None
    assert not state.v["b"].any()
    assert (state.v["a"] > 0).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: amos_lib.amos(0.1, lambda n, s: -1.0).init({"w": jnp.ones(2)}), ["'w'", "-1.0"]),
        (lambda: amos_lib.amos(0.1, lambda n, s: np.nan).init({"w": jnp.ones(2)}), ["'w'", "nan"]),
        (
            lambda: amos_lib.amos(0.1, lambda n, s: np.ones(3)).init({"w": jnp.ones(2)}),
            ["'w'", "(3,)", "(2,)"],
        ),
        (
            lambda: amos_lib.amos(0.1, lambda n, s: 1.0, lambda n, s: (3,)).init(
                {"w": jnp.ones(2)}
            ),
            ["'w'", "(3,)", "(2,)"],
        ),
        (
            lambda: amos_lib.amos(0.1, lambda n, s: 1.0, lambda n, s: 5).init({"w": jnp.ones(2)}),
            ["'w'", "5"],
        ),
        (lambda: amos_lib.amos(0.1, lambda n, s: 1.0).init({"w": jnp.arange(2)}), ["int32"]),
        (lambda: amos_lib.amos(0.1, lambda n, s: 1.0, beta=1.0), ["beta", "1.0"]),
        (lambda: amos_lib.amos(0.1, lambda n, s: 1.0, momentum=-0.1), ["momentum", "-0.1"]),
    ],
)
def test_invalid_arguments_are_named(make, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"a": jnp.ones(2)}, ["gradients", "'b'"]),
        ({"a": jnp.ones(2), "b": jnp.ones(4)}, ["'b'", "(4,)", "(3,)"]),
        ({"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)}, ["gradients", "'c'"]),
    ],
)
def test_gradients_with_another_structure_are_refused(grads, words):
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    tx = amos_lib.amos(0.1, lambda name, shape: 1.0)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        jax.jit(tx.update)(grads, tx.init(params), params)
    for word in words:
        assert word in str(error.value)


def test_update_without_params_is_refused():
    tx = amos_lib.amos(0.1, lambda name, shape: 1.0)
    with pytest.raises(ValueError, match="params"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_programs_that_import_a_module_find_the_function():
    from tekoa import amos, amos_helper

    eta_fn = amos_helper.params_fn_from_assign_map({".*": 0.5})
    tx, same = amos.amos(0.1, eta_fn), amos(0.1, eta_fn)
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.array([1.0, -2.0])}
    updates = [t.update(grads, t.init(params), params)[0]["w"] for t in (tx, same)]
    np.testing.assert_array_equal(*updates)
