import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import FrozenDict, meta

from tekoa.core import trees


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    scale: Any
    layers: Any


@struct.dataclass
class FlaxRecord:
    scale: Any
    layers: Any
    name: str = struct.field(pytree_node=False, default="static")


@jax.tree_util.register_pytree_node_class
class Unnamed:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class NnxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(2, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs)])


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        ones = nn.initializers.ones
        return nn.Dense(
            3,
            kernel_init=nn.with_partitioning(ones, ("in", "out")),
            bias_init=nn.with_logical_partitioning(ones, ("out",)),
        )(x)


class EquinoxModel(eqx.Module):
    dense: eqx.nn.Linear
    layers: list

    def __init__(self):
        key = jax.random.key(0)
        self.dense = eqx.nn.Linear(2, 3, key=key)
        self.layers = [eqx.nn.Linear(3, 3, use_bias=False, key=key)]


NNX_NAMES = ["dense/bias", "dense/kernel", "layers/0/bias", "layers/0/kernel"]


def linen_variables():
    return LinenModel().init(jax.random.key(0), jnp.ones((1, 2)))


def nnx_state():
    return nnx.state(NnxModel(), nnx.Param)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: {"dense": {"kernel": 1, "bias": 2}}, ["dense/bias", "dense/kernel"]),
        (lambda: FrozenDict({"dense": {"kernel": 1, "bias": 2}}), ["dense/bias", "dense/kernel"]),
        (lambda: {"a": [1, (2, 3)]}, ["a/0", "a/1/0", "a/1/1"]),
        (lambda: {3: 1, 10: 2}, ["3", "10"]),
        (lambda: Pair([1], {"x": 2}), ["left/0", "right/x"]),
        (lambda: Record(1, [2, 3]), ["scale", "layers/0", "layers/1"]),
        (lambda: FlaxRecord(1, {"w": 2}), ["scale", "layers/w"]),
        (lambda: {"u": Unnamed(1, Unnamed(2))}, ["u/0", "u/1/0"]),
        (nnx_state, NNX_NAMES),
        (lambda: nnx.as_pure(nnx_state()), NNX_NAMES),
        (lambda: nnx.to_pure_dict(nnx_state()), NNX_NAMES),
        (NnxModel, NNX_NAMES),
        (
            lambda: eqx.filter(EquinoxModel(), eqx.is_array),
            ["dense/weight", "dense/bias", "layers/0/weight"],
        ),
        (linen_variables, ["params/Dense_0/bias", "params/Dense_0/kernel"]),
        (lambda: meta.unbox(linen_variables()), ["params/Dense_0/bias", "params/Dense_0/kernel"]),
        (lambda: {"p": meta.Partitioned({"x": 1, "y": 2}, names=())}, ["p/x", "p/y"]),
        (lambda: nnx.Param({"a": 1, "b": [2]}), ["a", "b/0"]),
        (lambda: {"v": nnx.Param(meta.Partitioned(1, names=()))}, ["v"]),
        (lambda: {"a": None, "b": {}, "c": (), "d": optax.MaskedNode(), "e": 1}, ["e"]),
        (lambda: 5.0, [""]),
        (dict, []),
    ],
)
def test_leaves_are_named_by_their_path(make, names):
    tree = make()
    assert ["/".join(name) for name in trees.leaf_names(tree)] == names
    assert len(names) == len(jax.tree.leaves(tree))


def test_names_are_tuples_of_strings():
    assert trees.leaf_names({"a/b": [1]}) == [("a/b", "0")]


def test_is_leaf_works_for_none_and_for_boxes():
    assert trees.leaf_names({"a": None}, is_leaf=lambda x: x is None) == [("a",)]
    is_variable = lambda x: isinstance(x, nnx.Variable)
    state = nnx.State({"w": nnx.Param({"inner": 1, "other": 2})})
    assert trees.leaf_names(state, is_leaf=is_variable) == [("w",)]
    assert trees.leaf_names(state) == [("w", "inner"), ("w", "other")]


def test_flatten_named_keeps_leaves_in_order():
    named = trees.flatten_named({"b": 1, "a": [2, 3]})
    assert list(named.items()) == [("a/0", 2), ("a/1", 3), ("b", 1)]


def test_flatten_named_refuses_duplicate_names():
    with pytest.raises(ValueError, match="'a/b'"):
        trees.flatten_named({"a/b": 1, "a": {"b": 2}})


@pytest.mark.parametrize(
    "make", [nnx_state, linen_variables, lambda: Record(1.0, [2.0]), lambda: {"a": None, "b": 1.0}]
)
def test_map_named_keeps_the_structure_and_passes_names(make):
    tree = make()
    seen = []
    doubled = trees.map_named(lambda name, x, y: seen.append(name) or x + y, tree, tree)
    assert jax.tree.structure(doubled) == jax.tree.structure(tree)
    assert seen == trees.leaf_names(tree)
    np.testing.assert_array_equal(jax.tree.leaves(doubled)[0], 2 * jax.tree.leaves(tree)[0])


def test_map_named_accepts_deeper_trees_as_rest():
    result = trees.map_named(lambda name, x, pair: (name, x, pair), {"a": 1}, {"a": (2, 3)})
    assert result == {"a": (("a",), 1, (2, 3))}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"a": 1}, ["gradients", "missing ['b']", "unexpected []"]),
        ({"a": 1, "b": 2, "c": 3}, ["missing []", "unexpected ['c']"]),
        ([1, 2], ["'a'", "'0'"]),
        (FrozenDict({"a": 1, "b": 2}), ["expected", "FrozenDict"]),
    ],
)
def test_another_structure_is_reported_with_the_difference(seen, words):
    with pytest.raises(ValueError, match="structure") as error:
        trees.check_same_structure({"a": 1, "b": 2}, seen, "gradients")
    for word in words:
        assert word in str(error.value)


def test_long_differences_are_shortened():
    with pytest.raises(ValueError, match="and 95 more"):
        trees.check_same_structure({str(i): i for i in range(100)}, {}, "gradients")


def test_the_same_structure_passes_with_any_leaves():
    trees.check_same_structure({"a": 1}, {"a": np.ones(3)}, "gradients")


def test_sizes_are_computed_from_shapes():
    tree = {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "b": jnp.zeros((4,)), "c": None}
    assert trees.n_elements(tree) == 10
    assert trees.n_bytes(tree) == 2 * 6 + 4 * 4


def test_global_norm_sums_in_float32():
    # 10^4 ones in bfloat16 would stall at 256 if summed there.
    assert float(trees.global_norm({"a": jnp.ones(10_000, jnp.bfloat16)})) == 100.0
    assert float(trees.global_norm({"z": jnp.array([3 + 4j])})) == 5.0
    assert float(trees.global_norm({"a": None})) == 0.0


def test_sums_of_squares_has_one_float32_sum_per_leaf():
    sums = trees.sums_of_squares({"a": jnp.full(3, 2.0, jnp.bfloat16), "b": None, "c": 3.0})
    assert [float(x) for x in sums] == [12.0, 9.0]
    assert all(x.dtype == jnp.float32 for x in sums)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("int8", "int8"),
        ("complex64", "complex64"),
        ("bool", "bool"),
    ],
)
def test_only_small_floats_are_widened(dtype, wide):
    x = jnp.ones(2, dtype)
    assert trees.wide_dtype(x) == trees.widen(x).dtype == wide


def test_widened_numbers_are_strongly_typed():
    assert not trees.widen(2.0).weak_type


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_are_finite_checks_every_element(bad, dtype):
    good = {"a": jnp.ones((2, 5, 3), dtype), "b": jnp.ones(2, dtype), "c": None, "n": 1}
    assert all(trees.are_finite(good))
    for place in ((0, 0, 0), (1, 4, 2)):
        spoilt = {**good, "a": good["a"].at[place].set(bad)}
        assert [bool(x) for x in trees.are_finite(spoilt)] == [False, True, True]
    # Opposite infinities in one row do not cancel.
    assert not trees.are_finite(jnp.full((1, 4), bad, dtype) * jnp.asarray([1, -1, 1, -1], dtype))[
        0
    ]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_largest_numbers_are_finite(dtype):
    assert trees.are_finite(jnp.full((3, 1000), jnp.finfo(dtype).max))[0]
    assert trees.are_finite(jnp.zeros((3, 0), dtype))[0]
