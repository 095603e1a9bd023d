"""Loads parameters by name from the checkpoint of another model.

Parameters that match are loaded, all others are reported. Shapes and dtypes are changed only on
request.
"""

from typing import Any

import jax
import numpy as np

from tekoa.core import messages, trees
from tekoa.store import errors
from tekoa.store.formats.leaves import flatten, is_function
from tekoa.store.transfer import report


def warm_start(
    target: trees.PyTree,
    source: trees.PyTree,
    *,
    strict: bool = True,
    slice_shapes: bool = False,
    cast: bool = False,
) -> tuple[trees.PyTree, report.Report]:
    """Loads a checkpoint's parameters into a tree, by name.

    Args:
        target: The initial parameters; those that match nothing are kept.
        source: The checkpoint's parameters, such as `load(path)['model_params']`.
        strict: Raise if a parameter of the same name has another shape or dtype. If False, its
            initial value is kept, and the report says so.
        slice_shapes: Load the part that both shapes have in common, if the number of axes is
            the same.
        cast: Convert to the target's dtype.

    Returns:
        The parameters, with the target's structure, dtypes and shardings, and the report.

    Raises:
        errors.MismatchError: If no parameter matches, or if `strict` and shapes or dtypes
            differ; lists all differences.

    >>> params, table = warm_start({'w': np.zeros(2), 'new': np.ones(1)}, {'w': np.ones(2)})
    >>> params['w'].tolist(), table.names('missing')
    ([1.0, 1.0], ['new'])
    """
    stored = {name[1:]: leaf for name, leaf in flatten({"": source}).items()}
    rows: list[report.Row] = []

    def visit(name: trees.Name, leaf: Any) -> Any:
        if is_function(leaf):
            return leaf
        stored_value = stored.pop(name, None)
        value, row = load_leaf(name, leaf, stored_value, slice_shapes=slice_shapes, cast=cast)
        rows.append(row)
        return value

    params = trees.map_named(visit, target)
    for name, leaf in stored.items():
        rows.append(report.Row(name="/".join(name), outcome="unexpected", detail=_show(leaf)))
    table = report.Report(rows)
    mismatched = table.names("other shape", "other dtype")
    if strict and mismatched:
        raise errors.MismatchError(
            f"{len(mismatched)} parameters of the checkpoint do not match:\n{table}\nAllow this "
            "with slice_shapes or cast, or keep their initial values with strict=False.",
            mismatched,
        )
    if not table.names("loaded", "loaded in part"):
        raise errors.MismatchError(f"No parameter of the checkpoint matches:\n{table}")
    return params, table


def load_leaf(
    name: trees.Name, leaf: Any, value: Any, *, slice_shapes: bool = False, cast: bool = False
) -> tuple[Any, report.Row]:
    """Returns a target's new leaf and its row in the report; `value` is None if missing."""

    def row(outcome: report.Outcome, detail: str = "") -> report.Row:
        return report.Row(name="/".join(name), outcome=outcome, detail=detail)

    if value is None:
        return leaf, row("missing", _show(leaf))
    if trees.is_key(leaf) and not trees.is_key(value):
        value = trees.wrap_key(value, leaf)
    detail = "" if _show(leaf) == _show(value) else f"{_show(value)} -> {_show(leaf)}"
    if _dtype(value) != _dtype(leaf) and not cast:
        return leaf, row("other dtype", detail)
    if np.shape(value) == np.shape(leaf):
        return _like(leaf, value), row("loaded", detail)
    if not slice_shapes or np.ndim(value) != np.ndim(leaf):
        return leaf, row("other shape", detail)
    common = tuple(slice(min(a, b)) for a, b in zip(np.shape(leaf), np.shape(value), strict=True))
    merged = np.array(leaf)
    merged[common] = np.asarray(value)[common]
    return _like(leaf, merged), row("loaded in part", detail)


def _like(leaf: Any, value: Any) -> Any:
    if not trees.is_key(leaf):
        value = np.asarray(value).astype(_dtype(leaf), copy=False)
    return jax.device_put(value, leaf.sharding) if isinstance(leaf, jax.Array) else value


def _dtype(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype


def _show(value: Any) -> str:
    return messages.array_text(_dtype(value), np.shape(value))
