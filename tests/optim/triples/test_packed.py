import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.core import FrozenDict

from tekoa.core import trees
from tekoa.optim.triples import packed
from tekoa.testing import assert_trees_equal, count_compilations


@packed.optimizer
def averaging(rate, decay=0.5):
    """Moves towards the mean."""
    init = lambda x: {"x": x, "slots": [jnp.zeros_like(x)]}

    def update(i, g, state):
        mean = decay * state["slots"][0] + g
        return {"x": state["x"] - rate * (i + 1) * mean, "slots": [mean]}

    return init, update, lambda state: state["x"]


PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "more": [jnp.float32(2.0), None, {}]}


def stepped(params=PARAMS, n_steps=2):
    init, update, _ = averaging(0.1)
    state = init(params)
    for i in range(n_steps):
        state = update(i, jax.tree.map(jnp.ones_like, params), state)
    return state


def test_per_array_functions_work_on_trees():
    init, update, get_params = averaging(0.1)
    state = init(PARAMS)
    assert_trees_equal(get_params(state), PARAMS)
    state = update(1, jax.tree.map(jnp.ones_like, PARAMS), state)
    params = get_params(state)
    np.testing.assert_allclose(params["w"], PARAMS["w"] - 0.2, rtol=1e-6)
    assert jax.tree.structure(params) == jax.tree.structure(PARAMS)


def test_decorated_function_keeps_its_name_and_arguments():
    assert (averaging.__name__, averaging.__doc__) == ("averaging", "Moves towards the mean.")
    init, update, get_params = averaging(rate=1.0, decay=0.0)
    assert float(get_params(update(0, 2.0, init(5.0)))) == 3.0


def test_state_is_a_pytree_of_arrays_only():
    state = stepped()
    packed_state, tree_def, subtree_defs = state
    assert tree_def == jax.tree.structure(PARAMS)
    assert len(packed_state) == len(subtree_defs) == 2
    assert len(jax.tree.leaves(state)) == 4
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert trees.leaf_names(state)[0] == ("packed_state", "0", "0")
    doubled = jax.tree.map(lambda x: 2 * x, state)
    assert isinstance(doubled, packed.OptimizerState)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)


def test_python_numbers_do_not_compile_twice():
    init, update, _ = averaging(0.1)
    update = jax.jit(update)
    state = update(0, {"w": 1.0}, init({"w": 1.0}))
    with count_compilations() as compiled:
        update(1, {"w": 1.0}, state)
    assert compiled.total == 0


@pytest.mark.parametrize(
    "grads", [{"w": jnp.ones((2, 3))}, [1.0, 2.0, 3.0], {**PARAMS, "more": (2.0, None, {})}]
)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "plain"])
def test_error_for_wrong_gradients_shows_both_structures(grads, wrap):
    init, update, _ = averaging(0.1)
    with pytest.raises(TypeError, match="gradients") as error:
        wrap(update)(0, grads, init(PARAMS))
    assert str(jax.tree.structure(PARAMS)) in str(error.value)
    assert str(jax.tree.structure(grads)) in str(error.value)


def test_error_for_a_changed_state_shows_both_structures():
    broken = packed.optimizer(lambda: (lambda x: (x, x), lambda i, g, s: (s[0], [s[1]]), None))
    init, update, _ = broken()
    with pytest.raises(TypeError, match="structure") as error:
        update(0, 1.0, init(1.0))
    for structure in (jax.tree.structure((1, 2)), jax.tree.structure((1, [2]))):
        assert str(structure) in str(error.value)


def test_update_that_changes_a_shape_is_refused():
    init, update, _ = averaging(0.1)
    with pytest.raises(TypeError, match=r"\(3,\) to \(2, 3\)"):
        update(0, jnp.ones((2, 3)), init(jnp.ones(3)))


@pytest.mark.parametrize("params", [PARAMS, FrozenDict({"a": {"b": np.ones(2)}}), {}, 1.0])
def test_pack_inverts_unpack(params):
    state = stepped(params)
    again = packed.pack_optimizer_state(packed.unpack_optimizer_state(state))
    assert again == state  # The same arrays, not copies.
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_unpacked_state_has_a_join_point_for_each_parameter():
    unpacked = packed.unpack_optimizer_state(stepped())
    assert isinstance(unpacked["w"], packed.JoinPoint)
    assert set(unpacked["w"].subtree) == {"x", "slots"}
    assert unpacked["more"][1:] == [None, {}]
    (subtree,) = unpacked["w"]
    assert subtree is unpacked["w"].subtree


def test_packing_another_tree_names_the_leaf():
    with pytest.raises(TypeError, match=r"'a/0' is float.*JoinPoint"):
        packed.pack_optimizer_state({"a": [1.0], "b": packed.JoinPoint(2.0)})


def test_unpacked_state_survives_flax_serialization():
    state = stepped()
    unpacked = packed.unpack_optimizer_state(state)
    data = flax.serialization.to_bytes(unpacked)
    empty = jax.tree.map(jnp.zeros_like, unpacked)
    restored = packed.pack_optimizer_state(flax.serialization.from_bytes(empty, data))
    assert_trees_equal(restored, state)


def test_unpacked_state_survives_orbax(tmp_path):
    state = stepped()
    unpacked = packed.unpack_optimizer_state(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", unpacked)
        checkpointer.wait_until_finished()
        target = jax.tree.map(jnp.zeros_like, unpacked)
        restored = packed.pack_optimizer_state(checkpointer.restore(tmp_path / "state", target))
    assert_trees_equal(restored, state)
