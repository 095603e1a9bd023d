"""Names, sizes and comparisons of the leaves of any parameter tree.

A leaf's name is a tuple of strings, the same for a Linen dict, an `nnx.State`, an
Equinox module or a plain dict of the same layout: `('encoder', '0', 'kernel')`.
Boxes that a model library puts around an array (an NNX variable, a Linen
`Partitioned`) add nothing to the name.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import messages

PyTree = Any
Name = tuple[str, ...]


def leaf_names(tree: PyTree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Name]:
    """Returns the name of every leaf, in the order of `jax.tree.leaves`.

    Args:
        tree: Any pytree.
        is_leaf: As for `jax.tree.leaves`.

    Returns:
        One tuple of strings per leaf.

    >>> leaf_names({'dense': {'kernel': 0, 'bias': 0}, 'layers': [1, 2]})
    [('dense', 'bias'), ('dense', 'kernel'), ('layers', '0'), ('layers', '1')]
    """
    names = []
    is_user_leaf = is_leaf or (lambda _: False)
    for path, node in jax.tree.leaves_with_path(
        tree, is_leaf=lambda x: _is_box(x) or is_user_leaf(x)
    ):
        outer = tuple(map(_key_name, path))
        if _is_box(node) and not is_user_leaf(node):
            # A box's own field adds nothing to the name.
            for content in jax.tree.leaves(node, is_leaf=lambda x, box=node: x is not box):
                names += [outer + name for name in leaf_names(content, is_leaf=is_leaf)]
        else:
            names.append(outer)
    return names


def _key_name(key: Any) -> str:
    match key:
        case jax.tree_util.DictKey(key=name) | jax.tree_util.FlattenedIndexKey(key=name):
            return str(name)
        case jax.tree_util.SequenceKey(idx=name) | jax.tree_util.GetAttrKey(name=name):
            return str(name)
    return str(key).strip(".[]'\"")


def _is_box(node: Any) -> bool:
    # Looks only at loaded modules, so that no model library is imported here.
    boxes = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))
    return any(isinstance(node, getattr(sys.modules.get(m), name, ())) for m, name in boxes)


def named_leaves(tree: PyTree, *, is_leaf: Callable[[Any], bool] | None = None) -> dict[Name, Any]:
    """Returns the leaves by name, in the order of `jax.tree.leaves`.

    >>> named_leaves({'dense': {'kernel': 3, 'bias': 4}})
    {('dense', 'bias'): 4, ('dense', 'kernel'): 3}
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_leaf)
    return dict(zip(leaf_names(tree, is_leaf=is_leaf), leaves, strict=True))


def flatten_named(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves by name, joined by slashes.

    Raises:
        ValueError: If two leaves have the same joined name, as in {'a/b': 0, 'a': {'b': 0}}.

    >>> flatten_named({'dense': {'kernel': 3, 'bias': 4}})
    {'dense/bias': 4, 'dense/kernel': 3}
    """
    named: dict[str, Any] = {}
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        joined = "/".join(name)
        if joined in named:
            raise ValueError(
                f"Two leaves are named {joined!r}, as names are joined by '/'. Rename one."
            )
        named[joined] = leaf
    return named


def map_named(
    fn: Callable[..., Any],
    tree: PyTree,
    *rest: PyTree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """Applies `fn(name, leaf, *other_leaves)` to every leaf, keeping the structure.

    Args:
        fn: Called with the leaf's name (a tuple of strings) and the leaves.
        tree: The tree that defines names and structure.
        *rest: Trees with `tree`'s structure; they may have subtrees in place of its leaves.
        is_leaf: As for `jax.tree.map`.

    >>> map_named(lambda name, x: f"{'.'.join(name)}={x}", {'a': {'b': 1}})
    {'a': {'b': 'a.b=1'}}
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    names = leaf_names(tree, is_leaf=is_leaf)
    columns = [names, leaves, *map(treedef.flatten_up_to, rest)]
    return jax.tree.unflatten(treedef, map(fn, *columns))


def check_same_structure(expected: PyTree, tree: PyTree, what: str) -> None:
    """Raises if `tree` does not have the structure of `expected`.

    Args:
        expected: The tree that defines the structure.
        tree: The tree to check.
        what: The name of `tree` for the message, such as 'gradients'.

    Raises:
        ValueError: If the structures differ, with the leaves that are missing or unexpected.
    """
    if jax.tree.structure(expected) == jax.tree.structure(tree):
        return
    a = {"/".join(name) for name in leaf_names(expected)}
    b = {"/".join(name) for name in leaf_names(tree)}
    if a == b:
        difference = f"expected {jax.tree.structure(expected)}, got {jax.tree.structure(tree)}"
    else:
        missing, unexpected = (
            f"[{messages.some_of([repr(name) for name in sorted(names)])}]"
            for names in (a - b, b - a)
        )
        difference = f"missing {missing}, unexpected {unexpected}"
    raise ValueError(f"The {what} do not have the parameters' tree structure: {difference}.")


def is_key(x: Any) -> bool:
    """Returns whether a leaf is a typed PRNG key, or the shape of one.

    >>> is_key(jax.random.key(0)), is_key(1.0)
    (True, False)
    """
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def wrap_key(data: Any, like: Any) -> jax.Array:
    """Creates a PRNG key from its data, of the kind of another key or of its shape.

    >>> wrap_key(np.zeros(2, np.uint32), jax.eval_shape(jax.random.key, 0)) == jax.random.key(0)
    Array(True, dtype=bool)
    """
    impls: list[Any] = []
    # Only a traced key has an implementation.
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(data, impl=impls[0])


def to_numpy(x: Any) -> np.ndarray:
    """Copies a leaf, or the data of a PRNG key, to the host.

    >>> to_numpy(jax.random.key(0)).dtype
    dtype('uint32')
    """
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def n_elements(tree: PyTree) -> int:
    """Counts the elements of all leaves.

    >>> n_elements({'a': np.zeros((2, 3)), 'b': 1.0})
    7
    """
    return sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(tree))


def n_bytes(tree: PyTree) -> int:
    """Counts the bytes of all leaves from their shapes and dtypes.

    >>> n_bytes({'a': np.zeros((2, 3), np.float32)})
    24
    """
    return sum(
        int(np.prod(np.shape(leaf))) * jnp.result_type(leaf).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def global_norm(tree: PyTree) -> jax.Array:
    """Computes the L2 norm over all leaves, in float32 or wider.

    >>> float(global_norm({'a': np.float32([3.0]), 'b': np.float32([4.0])}))
    5.0
    """
    return jnp.sqrt(sum(sums_of_squares(tree), jnp.zeros((), jnp.float32)))


def sums_of_squares(tree: PyTree) -> list[jax.Array]:
    """Computes the sum of squares of each leaf, in float32 or wider.

    >>> [float(x) for x in sums_of_squares({'a': np.float32([3.0, 4.0]), 'b': 2.0})]
    [25.0, 4.0]
    """

    def sum_of_squares(x: Any) -> jax.Array:
        x = jnp.abs(x) if jnp.iscomplexobj(x) else x
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.sum(jnp.square(widen(x) if is_float else jnp.asarray(x, jnp.float32)))

    return list(map(sum_of_squares, jax.tree.leaves(tree)))


def are_finite(tree: PyTree) -> list[jax.Array]:
    """Computes for each leaf whether it has no NaN or Inf.

    >>> [bool(x) for x in are_finite({'a': np.float32([3.0, np.inf]), 'b': 2.0})]
    [False, True]
    """
    return [jnp.all(jnp.isfinite(_row_means(jnp.asarray(x)))) for x in jax.tree.leaves(tree)]


def _row_means(x: jax.Array) -> jax.Array:
    """Computes half the mean of each row: finite if the row is, also near the largest float.

    A matrix-vector product runs at memory speed on all cores. A reduction on CPU does not:
    over 800,000 numbers it took 3% of the time of a training step.
    """
    n = x.shape[-1] if x.ndim > 1 else 0
    return x @ jnp.full(n, 0.5 / n, x.dtype) if n else x


def shard_like(old: PyTree, new: PyTree) -> PyTree:
    """Moves new values to the shardings that the old ones have on a mesh with explicit axes.

    On other meshes the compiler decides, and nothing changes.
    """

    def shard(a: Any, b: Any) -> Any:
        sharding = jax.typeof(a).sharding
        if sharding.mesh.empty or jax.typeof(b).sharding == sharding:
            return b
        return jax.sharding.reshard(b, sharding)

    return jax.tree.map(shard, old, new)


def wide_dtype(x: Any) -> np.dtype:
    """Returns the dtype to sum in: float32 for smaller floats, else the leaf's own.

    >>> wide_dtype(jnp.ones(2, jnp.bfloat16)), wide_dtype(np.int32(1))
    (dtype('float32'), dtype('int32'))
    """
    dtype = jnp.result_type(x)
    is_small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if is_small else dtype


def widen(x: Any) -> jax.Array:
    """Converts a leaf to `wide_dtype`, strongly typed.

    >>> widen(jnp.ones(2, jnp.bfloat16))
    Array([1., 1.], dtype=float32)
    """
    return jnp.asarray(x, wide_dtype(x))


def nest(named: Mapping[Name, Any]) -> dict[str, Any]:
    """Builds a nested dict from leaves by name: the inverse of `named_leaves` for dicts.

    >>> nest({('dense', 'bias'): 4, ('dense', 'kernel'): 3})
    {'dense': {'bias': 4, 'kernel': 3}}
    """
    nested: dict[str, Any] = {}
    for (*parents, last), leaf in named.items():
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested
