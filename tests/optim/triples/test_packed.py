import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.core import FrozenDict
from jax.example_libraries import optimizers as jax_optimizers

from tekoa.core import trees
from tekoa.optim.triples import classic, packed
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
    points = jax.tree.leaves(unpacked)
    assert all(isinstance(point, packed.JoinPoint) for point in points)


def test_states_are_exchanged_with_jax():
    triples = [module.adam(0.1) for module in (jax_optimizers, classic)]
    params = {"w": np.float32([1.0, 2.0]), "b": [np.float32(3.0)]}
    states = [triple.update_fn(0, params, triple.init_fn(params)) for triple in triples]
    unpack = (jax_optimizers.unpack_optimizer_state, packed.unpack_optimizer_state)
    pack = (jax_optimizers.pack_optimizer_state, packed.pack_optimizer_state)
    for i, j in ((0, 1), (1, 0)):
        # As from a file: the original's way to store a state is a pickle.
        unpacked = pickle.loads(pickle.dumps(unpack[i](states[i])))
        received = pack[j](unpacked)
        assert_trees_equal(jax.tree.leaves(received), jax.tree.leaves(states[j]))
        after = [triples[j].update_fn(1, params, state) for state in (received, states[j])]
        assert_trees_equal(*map(jax.tree.leaves, after))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_of_numpy_stay_what_they_are(dtype):
    params = {"w": np.ones(3, dtype), "b": dtype(2.0)}
    for module in (jax_optimizers, classic):
        init, _, get_params = module.momentum(0.1, 0.9)
        for name, leaf in get_params(init(params)).items():
            assert leaf is params[name]
    with jax.enable_x64(True):
        results = []
        for module in (jax_optimizers, classic):
            init, update, get_params = module.adam(0.1)
            results.append(get_params(update(0, params, init(params)))["w"])
    assert results[0].dtype == results[1].dtype == dtype
    np.testing.assert_array_equal(*results)


def test_packing_another_tree_names_the_leaf():
    with pytest.raises(TypeError, match=r"'a/0' is float.*JoinPoint"):
        packed.pack_optimizer_state({"a": [1.0], "b": packed.JoinPoint(2.0)})


def subtrees_of(state):
    return jax.tree.map(lambda point: point.subtree, packed.unpack_optimizer_state(state))


def test_unpacked_state_survives_flax_serialization():
    state = stepped()
    subtrees = subtrees_of(state)
    data = flax.serialization.to_bytes(subtrees)
    empty = jax.tree.map(jnp.zeros_like, subtrees)
    assert_trees_equal(flax.serialization.from_bytes(empty, data), subtrees)


def test_unpacked_state_survives_orbax(tmp_path):
    subtrees = subtrees_of(stepped())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", subtrees)
        checkpointer.wait_until_finished()
        target = jax.tree.map(jnp.zeros_like, subtrees)
        assert_trees_equal(checkpointer.restore(tmp_path / "state", target), subtrees)
