import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.example_libraries import optimizers as original

from tekoa.optim.triples import classic, convert
from tekoa.testing import assert_trees_equal, count_compilations

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}


def regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3)).astype(np.float32)
    y = x @ np.float32([[1, 2], [3, 4], [5, 6]]) + np.float32([0.5, -0.5])

    def loss(params):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    return loss


def losses_in_optax_loop(tx, n_steps=50, params=PARAMS):
    value_and_grad = jax.value_and_grad(regression())

    @jax.jit
    def step(params, state):
        value, grads = value_and_grad(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for _ in range(n_steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


def losses_in_classic_loop(triple, n_steps=50, params=PARAMS):
    init, update, get_params = triple
    value_and_grad = jax.value_and_grad(regression())

    @jax.jit
    def step(i, state):
        value, grads = value_and_grad(get_params(state))
        return update(i, grads, state), value

    state, losses = init(params), []
    for i in range(n_steps):
        state, value = step(i, state)
        losses.append(float(value))
    return losses


def test_adam_gives_the_same_result_in_both_loops_and_families():
    adam = losses_in_classic_loop(original.adam(0.1))
    assert adam[-1] < adam[0] / 3
    assert losses_in_classic_loop(classic.adam(0.1)) == adam
    chain = optax.chain(optax.identity(), convert.from_triple(classic.adam(0.1)))
    np.testing.assert_allclose(losses_in_optax_loop(chain), adam, rtol=1e-4)
    np.testing.assert_allclose(losses_in_optax_loop(optax.adam(0.1)), adam, rtol=1e-4)


def test_adamw_gives_the_same_result_in_both_loops():
    adamw = losses_in_optax_loop(optax.adamw(0.1, weight_decay=0.01))
    assert adamw[-1] < adamw[0] / 3
    triple = convert.to_triple(optax.adamw(0.1, weight_decay=0.01))
    assert losses_in_classic_loop(triple) == pytest.approx(adamw, rel=1e-6)
    there_and_back = convert.from_triple(triple)
    np.testing.assert_allclose(losses_in_optax_loop(there_and_back), adamw, rtol=1e-4)


def test_schedules_see_the_same_steps():
    schedule = classic.exponential_decay(0.1, 5, 0.5)
    expected = losses_in_classic_loop(classic.sgd(schedule))
    from_triple = convert.from_triple(classic.sgd(schedule))
    np.testing.assert_allclose(losses_in_optax_loop(from_triple), expected, rtol=1e-4)
    to_triple = convert.to_triple(optax.sgd(schedule))
    np.testing.assert_allclose(losses_in_classic_loop(to_triple), expected, rtol=1e-4)


def test_triple_continues_from_the_parameters_of_the_chain():
    # Half of each step is discarded: a triple with its own copy of the parameters would miss it.
    tx = optax.chain(convert.from_triple(classic.sgd(0.5)), optax.scale(0.5))
    params, state = jnp.float32(1.0), tx.init(jnp.float32(1.0))
    for _ in range(3):
        updates, state = tx.update(params, state, params)  # The gradient of x^2 / 2.
        params = optax.apply_updates(params, updates)
    assert float(params) == 0.75**3


@pytest.mark.parametrize("maker", [classic.sgd, classic.adagrad, classic.adam, classic.sm3])
def test_state_has_no_copy_of_the_parameters(maker):
    params = {"w": jnp.full((3, 4), 7.0), "s": jnp.full((), 7.0)}
    state = convert.from_triple(maker(0.1)).init(params)
    assert not any((x == 7.0).any() for x in jax.tree.leaves(state))


def test_slots_are_trees_like_the_parameters():
    state = convert.from_triple(classic.adam(0.1)).init(PARAMS)
    assert len(state.slots) == 2
    for slot in state.slots:
        assert jax.tree.map(jnp.shape, slot) == jax.tree.map(jnp.shape, PARAMS)
    sm3 = convert.from_triple(classic.sm3(0.1)).init(PARAMS)
    assert jax.tree.map(jnp.shape, sm3.slots[1]) == {"w": [(3,), (2,)], "b": [(2,)]}


def test_tree_map_params_matches_slots_with_parameters():
    tx = convert.from_triple(classic.adam(0.1))
    specs = {"w": "spec of w", "b": "spec of b"}
    mapped = optax.tree_map_params(
        tx, lambda _, spec: spec, tx.init(PARAMS), specs, transform_non_params=lambda _: None
    )
    assert mapped == convert.FromTripleState(None, (specs, specs))


@pytest.mark.parametrize("maker", [original.adam, original.sm3, original.sgd])
def test_triples_of_jax_example_libraries_are_accepted(maker):
    tx = convert.from_triple(maker(0.1))
    params, state = PARAMS, tx.init(PARAMS)
    init, update, get_params = maker(0.1)
    expected = init(PARAMS)
    for i in range(3):
        updates, state = tx.update(PARAMS, state, params)
        params = optax.apply_updates(params, updates)
        expected = update(i, PARAMS, expected)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(get_params(expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maker", [classic.sgd, classic.adam, classic.sm3])
def test_bfloat16_parameters_get_bfloat16_updates_from_float32_slots(maker):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = convert.from_triple(maker(1e-3))
    updates, state = tx.update(params, tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.slots))
    # 1 - 1e-3 is not a bfloat16 number; the update must not be lost before optax adds it.
    assert updates["w"].astype(jnp.float32).max() < 0


def test_update_without_params_is_refused():
    tx = convert.from_triple(classic.sgd(0.1))
    with pytest.raises(ValueError, match="params"):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize(
    "make", [lambda: convert.to_triple(optax.adam(0.1)), lambda: classic.adam(0.1)]
)
def test_error_for_wrong_gradients_shows_both_structures(make):
    init, update, _ = make()
    with pytest.raises(TypeError) as error:
        update(0, {"w": jnp.ones((3, 2))}, init(PARAMS))
    assert str(jax.tree.structure(PARAMS)) in str(error.value)
    assert "PyTreeDef({'w': *})" in str(error.value)


def test_extra_arguments_are_passed_by_keyword_and_required_if_needed():
    init, update, get_params = convert.to_triple(optax.lbfgs())
    loss = regression()
    state = init(PARAMS)
    value, grads = jax.value_and_grad(loss)(PARAMS)
    with pytest.raises(TypeError, match=r"needs more than gradients.*value"):
        update(0, grads, state)
    state = update(0, grads, state, value=value, grad=grads, value_fn=loss)
    assert loss(get_params(state)) < value
    # A transformation that accepts but does not need extra arguments runs without them.
    lenient = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda u, s, p=None, *, value=None, **extra: (u, s)
    )
    init, update, get_params = convert.to_triple(lenient)
    assert float(get_params(update(0, jnp.float32(2.0), init(jnp.float32(1.0))))) == 3.0


def test_other_type_errors_are_passed_through():
    def broken(updates, state, params=None):
        raise TypeError("my own fault")

    init, update, _ = convert.to_triple(optax.GradientTransformation(lambda p: (), broken))
    with pytest.raises(TypeError, match=r"^my own fault$"):
        update(0, 1.0, init(1.0))


def test_weakly_typed_states_do_not_compile_twice():
    init, update, _ = convert.to_triple(optax.lbfgs(linesearch=None))
    step = jax.jit(lambda g, state: update(0, g, state))
    state = step(PARAMS, init(PARAMS))
    with count_compilations() as compiled:
        step(PARAMS, state)
    assert compiled.total == 0


def test_init_and_get_params_are_inverse():
    init, _, get_params = convert.to_triple(optax.adam(0.1))
    assert_trees_equal(jax.jit(get_params)(init(PARAMS)), PARAMS)
