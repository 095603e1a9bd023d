"""Parameters taken over by name from a checkpoint of another model.

What matches is taken, what does not is reported; a shape or dtype is changed only on
request.
"""

from typing import Any

import jax
import numpy as np

from tekoa.core import trees
from tekoa.store import errors, leaves, report


def warm_start(
    target: trees.PyTree,
    source: trees.PyTree,
    *,
    strict: bool = True,
    slice_shapes: bool = False,
    cast: bool = False,
) -> tuple[trees.PyTree, report.Report]:
    """Puts a checkpoint's parameters into a tree, by name.

    Args:
        target: Parameters as initialised; they stay where nothing matches.
        source: The checkpoint's parameters, such as `load(path)['model_params']`.
        strict: Refuse parameters of the same name and another shape or dtype; if
            False they stay as initialised, and the report says so.
        slice_shapes: Take the part that both shapes have in common, where the number
            of axes is the same.
        cast: Convert to the target's dtype.

    Returns:
        The parameters, with the target's structure, dtypes and shardings, and the
        report.

    Raises:
        errors.MismatchError: If `strict` and shapes or dtypes differ, listing all; or
            if not one parameter matches.

    >>> taken, table = warm_start({'w': np.zeros(2), 'new': np.ones(1)}, {'w': np.ones(2)})
    >>> taken['w'].tolist(), table.names('missing')
    ([1.0, 1.0], ['new'])
    """
    stored = {name[1:]: leaf for name, leaf in leaves.flatten({"": source}).items()}
    rows: list[report.Row] = []

    def visit(name: trees.Name, leaf: Any) -> Any:
        if leaves.is_function(leaf):
            return leaf
        value, row = take(name, leaf, stored.pop(name, None), slice_shapes=slice_shapes, cast=cast)
        rows.append(row)
        return value

    taken = trees.map_named(visit, target)
    for name, leaf in stored.items():
        rows.append(report.Row(name="/".join(name), outcome="unexpected", detail=_show(leaf)))
    table = report.Report(rows)
    refused = table.names("other shape", "other dtype")
    if strict and refused:
        raise errors.MismatchError(
            f"{len(refused)} parameters of the checkpoint do not fit:\n{table}\nAllow it with "
            "slice_shapes or cast, or leave them as initialised with strict=False.",
            refused,
        )
    if not table.names("taken", "taken in part"):
        raise errors.MismatchError(f"No parameter of the checkpoint matches:\n{table}")
    return taken, table


def take(
    name: trees.Name, leaf: Any, value: Any, *, slice_shapes: bool = False, cast: bool = False
) -> tuple[Any, report.Row]:
    """Gives the new leaf of a target, and the row that tells what was done.

    Args:
        name: The leaf's name.
        leaf: The leaf as initialised.
        value: What the checkpoint has for it, None if nothing.
        slice_shapes: See `warm_start`.
        cast: See `warm_start`.
    """

    def row(outcome: report.Outcome, detail: str = "") -> report.Row:
        return report.Row(name="/".join(name), outcome=outcome, detail=detail)

    if value is None:
        return leaf, row("missing", _show(leaf))
    if leaves.is_key(leaf):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
    detail = "" if _show(leaf) == _show(value) else f"{_show(value)} -> {_show(leaf)}"
    if _dtype(value) != _dtype(leaf) and not cast:
        return leaf, row("other dtype", detail)
    if np.shape(value) == np.shape(leaf):
        return _like(leaf, value), row("taken", detail)
    if not slice_shapes or np.ndim(value) != np.ndim(leaf):
        return leaf, row("other shape", detail)
    common = tuple(slice(min(a, b)) for a, b in zip(np.shape(leaf), np.shape(value), strict=True))
    merged = np.array(leaf)
    merged[common] = np.asarray(value)[common]
    return _like(leaf, merged), row("taken in part", detail)


def _like(leaf: Any, value: Any) -> Any:
    if not leaves.is_key(leaf):
        value = np.asarray(value).astype(_dtype(leaf), copy=False)
    return jax.device_put(value, leaf.sharding) if isinstance(leaf, jax.Array) else value


def _dtype(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype


def _show(value: Any) -> str:
    return f"{_dtype(value)}[{','.join(map(str, np.shape(value)))}]"
