import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.example_libraries import optimizers as original

import tekoa.optim
from tekoa.optim.triples import classic
from tekoa.testing import assert_trees_equal, count_compilations

OPTIMIZERS = {
    "sgd": {},
    "momentum": {"mass": 0.9},
    "nesterov": {"mass": 0.9},
    "adagrad": {},
    "adagrad_plain": {"momentum": 0.0},
    "rmsprop": {},
    "rmsprop_tuned": {"gamma": 0.8, "eps": 1e-3},
    "rmsprop_momentum": {},
    "adam": {},
    "adam_tuned": {"b1": 0.5, "b2": 0.9, "eps": 1e-3},
    "adamax": {},
    "sm3": {},
    "sm3_plain": {"momentum": 0.0},
}
STEP_SIZES = {
    "number": lambda module: 0.03,
    "decay": lambda module: module.exponential_decay(0.03, 4, 0.7),
    "pieces": lambda module: module.piecewise_constant([2, 5], [0.1, 0.03, 0.01]),
}


def make(case, module=classic, step_size=0.03):
    name = case.removesuffix("_plain").removesuffix("_tuned")
    return getattr(module, name)(step_size, **OPTIMIZERS[case])


def initial_params():
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "t": (2, 3, 2), "b": (5,), "s": ()}
    return {k: jnp.asarray(rng.normal(size=n), jnp.float32) for k, n in shapes.items()}


def gradients(n_steps=8):
    rng = np.random.default_rng(1)
    for i in range(n_steps):
        grads = {k: rng.normal(size=x.shape) for k, x in initial_params().items()}
        grads["w"][0] = 0.0  # Rows without gradient must not divide by zero.
        yield i, {k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}


def run(triple, jit):
    """Yields the parameters after each step; sm3 of the original cannot jit get_params."""
    init, update, get_params = triple
    update = jax.jit(update) if jit else update
    state = init(initial_params())
    for i, grads in gradients():
        state = update(i, grads, state)
        yield get_params(jax.tree.map(np.asarray, state)) if jit else get_params(state)


def test_all_names_of_the_original_are_in_one_module():
    helpers = {"functools", "partial", "namedtuple", "jax", "jnp", "map", "zip", "annotations"}
    helpers |= {"Any", "Callable", "NamedTuple", "safe_map", "safe_zip", "unzip2"}
    names = {name for name in dir(original) if not name.startswith("_")} - helpers
    for module in (tekoa.optim.optimizers, tekoa.optim.classic):
        assert names <= set(vars(module))


# Each optimizer with and without jit, with a number and a schedule.
@pytest.mark.parametrize(
    ("case", "step_size", "jit"),
    [
        *((case, "decay", True) for case in OPTIMIZERS),
        *((case, "number", False) for case in OPTIMIZERS),
        *((case, "number", True) for case in ("momentum", "adam", "sm3")),
        *((case, "pieces", False) for case in ("momentum", "adam", "sm3")),
    ],
)
def test_updates_match_the_original_bit_for_bit(case, step_size, jit):
    ours, theirs = (
        run(make(case, module, STEP_SIZES[step_size](module)), jit)
        for module in (classic, original)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_trees_equal(jax.tree.map(np.asarray, a), jax.tree.map(np.asarray, b))


@pytest.mark.parametrize("case", ["adam", "sm3"])
def test_bits_are_the_same_inside_scan(case):
    grads = jax.tree.map(lambda *xs: jnp.stack(xs), *(g for _, g in gradients()))

    def scanned(triple):
        init, update, _ = triple
        step = lambda state, x: (update(x[0], x[1], state), None)
        state, _ = jax.lax.scan(step, init(initial_params()), (jnp.arange(8), grads))
        return state

    ours = classic.unpack_optimizer_state(scanned(make(case)))
    if case == "adam":  # sm3's shape leaves make the original fail in scan, too.
        theirs = original.unpack_optimizer_state(scanned(make(case, original)))
        for name, point in ours.items():
            assert_trees_equal(point.subtree, theirs[name].subtree)
    for name, params in zip(initial_params(), initial_params().values(), strict=True):
        assert ours[name].subtree[0].shape == params.shape


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_get_params_can_be_jitted_and_inverts_init(case):
    init, _, get_params = make(case)
    params = jax.jit(get_params)(init(initial_params()))
    assert_trees_equal(params, initial_params())


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_state_has_only_arrays_and_keeps_its_dtypes(case):
    init, update, _ = make(case)
    update = jax.jit(update)
    state = init(initial_params())
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(state))
    state = update(0, initial_params(), state)
    with count_compilations() as compiled:
        update(1, initial_params(), state)
    assert compiled.total == 0


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_bfloat16_parameters_keep_their_dtype_and_have_float32_slots(case):
    init, update, get_params = make(case)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), initial_params())
    state = update(0, params, init(params))
    assert {x.dtype for x in jax.tree.leaves(get_params(state))} == {jnp.dtype(jnp.bfloat16)}
    for own in classic.unpack_optimizer_state(state).values():
        slots = jax.tree.leaves(own.subtree)[1:]
        assert all(x.dtype == jnp.float32 for x in slots)


def test_bfloat16_second_moment_does_not_stall():
    init, update, _ = classic.adam(1e-3)
    one = jnp.ones((), jnp.bfloat16)
    state = jax.lax.fori_loop(0, 6000, lambda i, state: update(i, one, state), init(one))
    second_moment = state.packed_state[0][2]
    np.testing.assert_allclose(second_moment, 1 - 0.999**6000, rtol=1e-3)  # 0.9975


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_zero_and_tiny_gradients_give_no_nan(case):
    init, update, get_params = make(case)
    update = jax.jit(update)
    for size in np.float32([0.0, 1e-30, 1e-42]):
        grads = {name: np.full(x.shape, size) for name, x in initial_params().items()}
        state = init(initial_params())
        for i in range(3):
            state = update(i, grads, state)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(get_params(state)))


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_empty_arrays_and_empty_trees_are_accepted(case):
    init, update, get_params = make(case)
    params = {"none": None, "empty": jnp.zeros((0, 3)), "node": ()}
    assert_trees_equal(get_params(update(0, params, init(params))), params)
    assert get_params(update(0, {}, init({}))) == {}


def test_sm3_stores_one_vector_per_axis():
    init, _, _ = classic.sm3(0.1)
    state = init(jnp.ones((30, 40)))
    assert sum(x.size for x in jax.tree.leaves(state)) == 2 * 30 * 40 + 30 + 40


def test_integer_parameters_are_promoted_as_in_the_original():
    for module in (classic, original):
        init, update, get_params = module.sgd(0.5)
        assert float(get_params(update(0, jnp.float32(1), init(jnp.int32(3))))) == 2.5


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "plain"])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_norm_and_clipping_match_the_original_bit_for_bit(max_norm, jit):
    wrap = jax.jit if jit else lambda f: f
    tree = initial_params()
    assert_trees_equal(wrap(classic.l2_norm)(tree), wrap(original.l2_norm)(tree))
    ours, theirs = (
        wrap(lambda t, m=module: m.clip_grads(t, max_norm))(tree) for module in (classic, original)
    )
    assert_trees_equal(ours, theirs)


def test_norm_and_clipping_match_hand_arithmetic():
    tree = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]]), "c": None}
    assert float(classic.l2_norm(tree)) == 5.0
    assert float(classic.l2_norm({})) == 0.0
    assert float(classic.l2_norm(jnp.array([3 + 4j]))) == 5.0
    np.testing.assert_allclose(classic.clip_grads(tree, 1.0)["b"], [[0.8]], rtol=1e-6)
    np.testing.assert_array_equal(classic.clip_grads(tree, 6.0)["a"], [3.0])
    zeros = classic.clip_grads(jnp.zeros(2, jnp.bfloat16), 1.0)
    assert zeros.dtype == jnp.bfloat16
    assert not zeros.any()


def test_every_public_name_of_the_original_exists():
    names = [name for name, thing in vars(original).items() if not name.startswith("_")]
    own = [n for n in names if getattr(vars(original)[n], "__module__", "") == original.__name__]
    assert set(own) <= set(dir(classic)), set(own) - set(dir(classic))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_sm3_continues_a_state_of_the_original(shape):
    x, g = (jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32) for i in (0, 1))
    (init, update, get_params), ours = original.sm3(0.1), classic.sm3(0.1)
    state = other = update(0, g, init(x))
    for i in (1, 2):
        state, other = update(i, g, state), ours.update_fn(i, g, other)
    assert_trees_equal(other.packed_state, state.packed_state)
    assert_trees_equal(ours.params_fn(other), get_params(state))
    assert jnp.shape(jax.jit(ours.params_fn)(other)) == shape
