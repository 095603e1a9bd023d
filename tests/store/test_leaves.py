"""Leaves: names, descriptions and the index file."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.store import errors, leaves


@pytest.mark.parametrize(
    ("value", "shape", "dtype", "kind", "detail"),
    [
        (jnp.ones((2, 3), jnp.bfloat16), (2, 3), "bfloat16", "array", ""),
        (np.int8(3), (), "int8", "array", ""),
        (3, (), "int64", "python", "int"),
        (2.5, (), "float64", "python", "float"),
        (True, (), "bool", "python", "bool"),
        (jax.random.key(0), (2,), "uint32", "key", "fry"),
        (np.ones(2, ">f4"), (2,), "float32", "array", ""),
    ],
)
def test_leaf_is_described(value, shape, dtype, kind, detail):
    leaf, array = leaves.describe(("x",), value)
    assert (leaf.shape, leaf.dtype, leaf.kind) == (shape, dtype, kind)
    assert leaf.detail in (detail, "threefry2x32")
    assert array.shape == shape


@pytest.mark.parametrize("value", ["text", np.array(["a"]), object(), np.zeros(2, "V4")])
def test_what_is_not_a_number_is_refused_by_name(value):
    with pytest.raises(TypeError, match="'a/b'"):
        leaves.describe(("a", "b"), value)


def test_functions_are_not_leaves_to_store():
    assert leaves.describe(("x",), jax.nn.relu) is None


def test_names_start_with_the_item():
    flat = leaves.flatten({"p": {"a": [1, 2]}, "q": 3})
    assert flat == {("p", "a", "0"): 1, ("p", "a", "1"): 2, ("q",): 3}


def test_same_names_are_refused():
    class Odd(dict):
        pass

    jax.tree_util.register_pytree_with_keys(
        Odd,
        lambda odd: ([(jax.tree_util.DictKey("x"), 1), (jax.tree_util.DictKey("x"), 2)], None),
        lambda _, children: Odd(),
    )
    with pytest.raises(ValueError, match="both named 'p/x'"):
        leaves.flatten({"p": Odd()})


def test_snapshot_is_not_changed_by_later_writes():
    tree = {"a": np.zeros(2), "b": jnp.zeros(2)}
    fixed = leaves.snapshot({"p": tree})
    tree["a"][:] = 1
    tree["c"] = 1
    assert fixed()["p"]["a"].tolist() == [0, 0]
    assert set(fixed()["p"]) == {"a", "b"}
    assert fixed()["p"]["b"] is tree["b"]


def test_classes_of_optimizer_states_are_remembered():
    class Outer(NamedTuple):
        inner: tuple

    tx = optax.chain(optax.clip(1.0), optax.trace(0.9))
    nodes = leaves.node_classes({"s": Outer(inner=tx.init({"w": jnp.ones(1)}))})
    assert nodes[("s",)] == "Outer"
    assert nodes[("s", "inner", "1")] == "TraceState"


def test_index_comes_back_as_written(tmp_path):
    leaf = leaves.Leaf(name=("p", "a.b", ""), shape=(2,), dtype="int4", kind="array")
    index = leaves.Index(
        step=3,
        leaves={leaf.name: leaf},
        items=["p", "empty"],
        meta={"x": [1]},
        metrics={"loss": 0.5},
        nodes={("p",): "State"},
    )
    leaves.write_index(tmp_path, index)
    assert leaves.read_index(tmp_path) == index


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"leaves": 3}', "null"])
def test_unreadable_index_is_damage(tmp_path, text):
    (tmp_path / "tekoa.json").write_text(text)
    with pytest.raises(errors.DamagedError, match=r"tekoa\.json"):
        leaves.read_index(tmp_path)


def test_unknown_dtype_is_damage():
    with pytest.raises(errors.DamagedError, match="'float99'"):
        leaves.to_dtype("float99")


def test_index_with_a_leaf_inside_a_leaf_is_damage(tmp_path):
    inner, outer = (leaves.Leaf(name=name, shape=(), dtype="int8") for name in (("a", "b"), ("a",)))
    index = leaves.Index(step=1, leaves={("a", "b"): inner, ("a",): outer}, items=["a"], meta={})
    leaves.write_index(tmp_path, index)
    with pytest.raises(errors.DamagedError, match="both a leaf and a node"):
        leaves.read_index(tmp_path)
