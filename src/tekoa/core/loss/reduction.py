"""How a loss reduces the rows of a batch, found by evaluating it on a few made-up rows.

Gradient accumulation sees a batch in parts. The losses of the parts are averaged if the loss is a
mean over rows, and added if it is a sum. If the value of one row depends on other rows, as in a
contrastive loss, no combination of the parts is the loss of the full batch.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import metrics, trees
from tekoa.core.trees import PyTree

Reduction = Literal["auto", "mean", "sum"]
LOSS = ""  # The key of the loss among the names of metrics.

# Two rows per part: code that squeezes axes of size 1 still works.
_N_ROWS, _N_PARTS = 2, 2
_N_DRAWS = 6
_TOLERANCE = 1e-3


class ReductionError(ValueError):
    """The losses of parts of a batch cannot be combined to the loss of the full batch."""


class _Leaf(NamedTuple):
    """An argument of the loss: its shape without rows, and whether it has rows."""

    shape: tuple[int, ...]
    dtype: Any
    has_rows: bool


def find_reductions(
    loss: Callable[..., Any] | None, whole: PyTree, part: PyTree
) -> dict[str, Reduction]:
    """Finds how a loss, and each of its metrics, reduces the rows of a batch.

    Args:
        loss: As for `make_train_step`.
        whole: Shapes of the loss's arguments for a full batch.
        part: Shapes of the same arguments for a part of it.

    Returns:
        The reduction of the loss under `LOSS`, and that of each metric under its name.

    Raises:
        ReductionError: If the loss is neither a mean nor a sum over rows, or cannot be evaluated
            by itself.
    """
    if loss is None:
        raise ReductionError(
            "accumulate needs to know how the loss that the model returns reduces the rows of a "
            f"batch. Return Mean(total, count), or {_DECLARE}."
        )
    before, structure = jax.tree.flatten(whole)
    leaves = tuple(map(_leaf, before, jax.tree.leaves(part)))
    find = _find
    try:
        hash(loss)
    except TypeError:
        find = _find.__wrapped__  # The cache needs a hash.
    return dict(find(loss, structure, leaves, min(_N_ROWS, _n_rows(part))))


_DECLARE = "declare reduction='mean' or reduction='sum' where you pass the loss"


def _leaf(whole: Any, part: Any) -> _Leaf:
    if whole.shape == part.shape:
        return _Leaf(whole.shape, whole.dtype, has_rows=False)
    if whole.shape[1:] != part.shape[1:]:
        raise ReductionError(
            f"accumulate would change this model: an output has shape {whole.shape} for a full "
            f"batch and {part.shape} for a part of it, so rows depend on each other. Train "
            f"without accumulate, or {_DECLARE}."
        )
    return _Leaf(whole.shape[1:], whole.dtype, has_rows=True)


def _n_rows(part: PyTree) -> int:
    return min((leaf.shape[0] for leaf in jax.tree.leaves(part) if leaf.shape), default=_N_ROWS)


@functools.lru_cache(maxsize=64)  # Each program of a loop traces the step again.
def _find(
    loss: Callable[..., Any], structure: Any, leaves: tuple[_Leaf, ...], n_rows: int
) -> tuple[tuple[str, Reduction], ...]:
    def values(arguments: list[list[Any]]) -> list[dict[str, metrics.Mean]]:
        return [_values(loss(*structure.unflatten(args))) for args in arguments]

    rng = np.random.default_rng(0)
    draws = [_draw(rng, leaves, n_rows) for _ in range(_N_DRAWS)]
    try:
        # A step may be traced for a mesh; the made-up rows are on one device.
        no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
        with jax.ensure_compile_time_eval(), no_mesh:
            run = jax.jit(values)
            results = [jax.device_get(run(jax.device_put(draw))) for draw in draws]
    except Exception as error:
        raise ReductionError(
            "accumulate needs to know how the loss reduces the rows of a batch, but the loss "
            f"could not be evaluated on {_N_PARTS * n_rows} and {n_rows} rows "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). To "
            f"combine the losses of the parts nevertheless, {_DECLARE}."
        ) from error
    reductions: list[tuple[str, Reduction]] = []
    for name in results[0][0]:
        reduction = _classify([[values[name] for values in draw] for draw in results])
        if reduction is None and name == LOSS:
            raise ReductionError(_refusal([values[LOSS] for values in results[0]]))
        reductions.append((name, reduction or "mean"))
    return tuple(reductions)


def _values(result: Any) -> dict[str, metrics.Mean]:
    loss, metric_values = split_metrics(result)
    one = jnp.ones((), jnp.float32)
    scalars = {LOSS: loss, **metric_values}
    return {
        name: value if isinstance(value, metrics.Mean) else metrics.Mean(jnp.mean(value), one)
        for name, value in scalars.items()
        if isinstance(value, (metrics.Mean, jax.Array, np.ndarray, int, float))
    }


def split_metrics(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Splits what a loss returns: the loss, or the loss and a dict of metrics."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result
    return result, {}


def reported_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss to measure: the metric "loss" that a loss function returns, or its value."""

    def reported(*args: Any) -> Any:
        value, metric_values = split_metrics(loss(*args))
        return metric_values.get("loss", value)

    return reported


def _draw(rng: np.random.Generator, leaves: tuple[_Leaf, ...], n_rows: int) -> list[list[Any]]:
    """Returns arguments of the loss for all rows and for each part of them."""
    columns = [_column(rng, leaf, n_rows) for leaf in leaves]
    return [[column[i] for column in columns] for i in range(_N_PARTS + 1)]


def _column(rng: np.random.Generator, leaf: _Leaf, n_rows: int) -> list[Any]:
    if not leaf.has_rows:
        # Values that differ: a loss that depends on them fits no combination of parts.
        return [_sample(rng, leaf.shape, leaf.dtype, 0.5) for _ in range(_N_PARTS + 1)]
    # Parts with different numbers of ones: a mean over ones differs from the mean over parts.
    parts = [_sample(rng, (n_rows, *leaf.shape), leaf.dtype, p) for p in (0.9, 0.4)]
    if trees.is_key(parts[0]):
        return [jnp.concatenate(parts), *parts]
    return [np.concatenate(parts), *parts]


def _sample(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, density: float) -> Any:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(int(rng.integers(2**31))), shape)
    if jnp.issubdtype(dtype, jnp.inexact):
        # Valid as probabilities, logits, weights and values.
        return rng.uniform(0.1, 0.9, shape).astype(dtype)
    return (rng.random(shape) < density).astype(dtype)


def _classify(draws: list[list[metrics.Mean]]) -> Reduction | None:
    """Returns the reduction on which all draws agree, or None."""
    kinds = {_kind(*draw) for draw in draws} - {"unclear"}
    return kinds.pop() if len(kinds) == 1 else None


def _kind(whole: metrics.Mean, *parts: metrics.Mean) -> Any:
    totals = np.array([part.total for part in parts], np.float64)
    counts = np.array([part.count for part in parts], np.float64)
    if not np.all(np.isfinite([whole.total, whole.count, *totals, *counts])):
        return "unclear"
    scale = _TOLERANCE * np.abs(totals).max()
    is_added = abs(whole.total - totals.sum()) <= scale
    is_averaged = abs(whole.total - totals.mean()) <= scale
    has_fixed_count = np.allclose(counts, whole.count, rtol=_TOLERANCE)
    if is_added and is_averaged:
        return "unclear"  # The loss of these rows is 0.
    if is_added:
        return "sum" if has_fixed_count else "mean"
    return "mean" if is_averaged and has_fixed_count else None


def _refusal(values: list[metrics.Mean]) -> str:
    whole, *parts = (float(value.total) / float(value.count or 1) for value in values)
    shown = " and ".join(f"{part:.4g}" for part in parts)
    return (
        "accumulate would change this loss: it is neither a mean nor a sum over rows. On made-up "
        f"rows it is {whole:.4g}, and {shown} on the two halves of them. A weighted mean should "
        "return Mean(total, count). If rows depend on each other, as in a contrastive loss, train "
        f"without accumulate; to combine the losses of the parts nevertheless, {_DECLARE}."
    )
