"""Leaves: names, descriptions and snapshots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.store import errors
from tekoa.store.formats import leaves


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
def test_leaf_that_is_not_a_number_raises_with_its_name(value):
    with pytest.raises(TypeError, match="'a/b'"):
        leaves.describe(("a", "b"), value)


def test_functions_are_not_stored():
    assert leaves.describe(("x",), jax.nn.relu) is None


def test_names_start_with_the_item():
    flat = leaves.flatten({"p": {"a": [1, 2]}, "q": 3})
    assert flat == {("p", "a", "0"): 1, ("p", "a", "1"): 2, ("q",): 3}


def test_duplicate_names_raise():
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
    copy = leaves.snapshot({"p": tree})
    tree["a"][:] = 1
    tree["c"] = 1
    assert copy()["p"]["a"].tolist() == [0, 0]
    assert set(copy()["p"]) == {"a", "b"}
    assert copy()["p"]["b"] is tree["b"]


def test_classes_of_optimizer_states_are_recorded():
    class Outer(NamedTuple):
        inner: tuple

    tx = optax.chain(optax.clip(1.0), optax.trace(0.9))
    nodes = leaves.node_classes({"s": Outer(inner=tx.init({"w": jnp.ones(1)}))})
    assert nodes[("s",)] == "Outer"
    assert nodes[("s", "inner", "1")] == "TraceState"


def test_unknown_dtype_is_damage():
    with pytest.raises(errors.DamagedError, match="'float99'"):
        leaves.to_dtype("float99")
