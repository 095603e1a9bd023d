"""Batches: model inputs and loss targets, whose first axis is the rows."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import messages, trees
from tekoa.core.trees import PyTree


def split_batch(batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Separates the inputs of a batch from its targets.

    Accepts pairs such as `(x, y)`, `((x, ...), (y, ...))` or `((x, ...), ())`. A mapping is
    both the only input and the only target, for models and losses that select by name.

    Raises:
        TypeError: If the batch is anything else.

    >>> split_batch(('x', ('y', 'z')))
    (('x',), ('y', 'z'))
    """
    if isinstance(batch, Mapping):
        return (batch,), (batch,)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = batch
        return _as_tuple(inputs), _as_tuple(targets)
    raise TypeError(
        "Data must yield pairs (inputs, targets), where each may be a tuple, or dicts; got "
        f"{_kind(batch)}."
    )


def _kind(batch: Any) -> str:
    size = f" of {len(batch)} entries" if isinstance(batch, (tuple, list)) else ""
    return f"a {type(batch).__name__}{size}"


def split_named(
    batch: Any, *, inputs: str | Sequence[str], targets: str | Sequence[str] | None = None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Separates the inputs of a batch that is a dict from its targets, by their names.

    Args:
        batch: A mapping.
        inputs: One name or several.
        targets: One name or several; by default the only entry that is left.

    Raises:
        TypeError: If the batch is not a mapping.
        ValueError: If it has no such entry, or several are left.

    >>> split_named({'x': 1, 'y': 2}, inputs='x')
    ((1,), (2,))
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"inputs={inputs!r} needs batches that are dicts, got {_kind(batch)}.")
    chosen = _names(inputs)
    target_names = _names(targets) if targets is not None else sorted(set(batch) - set(chosen))
    if missing := [name for name in (*chosen, *target_names) if name not in batch]:
        raise ValueError(
            f"The batch has no entry {', '.join(map(repr, missing))}; it has {sorted(batch)}."
        )
    if targets is None and len(target_names) > 1:
        raise ValueError(
            f"The batch has several entries besides {inputs!r}: {target_names}. Set targets=."
        )
    return tuple(batch[name] for name in chosen), tuple(batch[name] for name in target_names)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def check_arrays(batch: Any) -> None:
    """Raises if a leaf of the batch is not an array or a number.

    Raises:
        TypeError: With the name and the value of the leaf.
    """
    for name, leaf in trees.named_leaves(batch).items():
        kind = getattr(getattr(leaf, "dtype", None), "kind", None)
        is_number = np.isscalar(leaf) if kind is None else kind not in ("U", "S", "O")
        if not is_number or isinstance(leaf, (str, bytes)):
            raise TypeError(
                f"Entry {'/'.join(name) or 'batch'!r} of the batch must be an array of numbers, "
                f"got {type(leaf).__name__} {str(leaf)[:40]!r}."
            )


def n_rows(batch: Any) -> int:
    """Counts the rows: the size of the first axis of the first array that has one.

    >>> n_rows((np.zeros((4, 2)), np.zeros(4)))
    4
    """
    return next((x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), 1)


def n_tokens_per_row(inputs: Any) -> int | None:
    """Returns the length of the sequences of tokens: integers with rows and positions.

    Returns:
        None if there are none. Bytes do not count: they are pixels.

    >>> n_tokens_per_row((np.zeros((4, 128), np.int32),))
    128
    >>> n_tokens_per_row(jnp.zeros((4, 128), int))
    128
    >>> n_tokens_per_row((np.zeros((4, 28, 28), np.uint8),)) is None
    True
    """
    shapes = (
        np.shape(x)
        for x in jax.tree.leaves(inputs)
        if jnp.issubdtype(jnp.result_type(x), jnp.integer) and jnp.result_type(x).itemsize > 1
    )
    return next((shape[1] for shape in shapes if len(shape) == 2), None)


def microbatches(tree: PyTree, n: int) -> PyTree:
    """Splits the rows of every array into `n` parts along a new first axis.

    Part i has the rows i, i + n, i + 2n, ..., so that on a mesh every part has rows from every
    device.

    Raises:
        ValueError: If the number of rows is not divisible by `n`.
    """

    def split(name: trees.Name, x: Any) -> jax.Array:
        if jnp.ndim(x) == 0 or x.shape[0] % n:
            raise ValueError(
                f"accumulate={n} needs a number of rows divisible by {n}, but {'/'.join(name)!r} "
                f"has shape {jnp.shape(x)}."
            )
        return jnp.swapaxes(jnp.reshape(x, (x.shape[0] // n, n, *x.shape[1:])), 0, 1)

    return trees.map_named(split, tree)


def undo_microbatches(tree: PyTree) -> PyTree:
    """Merges the parts created by `microbatches`, in the original order of the rows."""
    return jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree
    )


@contextlib.contextmanager
def described_errors(batch: Any, split: Any) -> Iterator[None]:
    """Adds to an error of a model or a loss what they received.

    Args:
        batch: The batch.
        split: Separates its inputs from its targets.
    """
    try:
        yield
    except Exception as error:
        if isinstance(batch, Mapping) and split is split_batch:
            error.add_note(
                f"The batch is a dict with the entries {sorted(batch)}, and the model received all "
                "of it as its only input. Name what it should receive: inputs='x', targets='y'."
            )
        with contextlib.suppress(Exception):  # The split itself may have failed.
            parts = zip(("inputs", "targets"), split(batch), strict=True)
            texts = (f"{name} {_without_quotes(shapes_to_json(part))}" for name, part in parts)
            error.add_note(f"The batch has {' and '.join(texts)}.")
        raise


def _without_quotes(shapes: Any) -> str:
    return ", ".join(str(shape).replace("'", "") for shape in shapes) or "none"


def describe(batch: Any) -> str:
    """Returns the names, dtypes and shapes of a batch as one line.

    >>> describe({'x': np.zeros((4, 2), np.float32)})
    'x float32[4,2]'
    """
    return ", ".join(
        f"{'/'.join(name) or 'batch'} {messages.array_text(np.result_type(leaf), np.shape(leaf))}"
        for name, leaf in trees.named_leaves(batch).items()
    )


def shapes_to_json(tree: Any) -> Any:
    """Returns the dtypes and shapes of arrays in dicts, lists and tuples as JSON values.

    Returns:
        The same nesting with texts such as 'float32[4,2]'; None where there is something else.

    >>> shapes_to_json((np.zeros((4, 2), np.float32), {'length': np.zeros(4, np.int32)}))
    ['float32[4,2]', {'length': 'int32[4]'}]
    """
    if isinstance(tree, Mapping):
        return {str(name): shapes_to_json(part) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [shapes_to_json(part) for part in tree]
    is_array = hasattr(tree, "dtype") and not trees.is_key(tree)
    return messages.array_text(np.dtype(tree.dtype), tree.shape) if is_array else None


def shapes_from_json(value: Any) -> Any:
    """Returns the shapes that `shapes_to_json` describes, as `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: If the value describes something else.

    >>> shapes_from_json(['float32[4,2]'])
    (ShapeDtypeStruct(shape=(4, 2), dtype=float32),)
    """
    if isinstance(value, dict):
        return {name: shapes_from_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return tuple(map(shapes_from_json, value))
    match = re.fullmatch(r"(\w+)\[((?:\d+,?)*)\]", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"Not the dtype and shape of an array: {value!r}")
    try:
        dtype = jnp.dtype(match[1])
    except TypeError:
        raise ValueError(f"Unknown dtype: {match[1]!r}") from None
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, match[2].split(",")))), dtype)
