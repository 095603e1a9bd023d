"""A table of a model's parameters, with its size, its cost and its scales."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from tekoa.bridges import any_model, scales
from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.core.model import run_model
from tekoa.fitting import loss_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One parameter: its name, shape, dtype, and the scale that was found for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: float | None
    role: str

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What `summary` returns; print it for a table.

    Attributes:
        rows: One row per parameter.
        n_bytes: Bytes of the parameters.
        n_variable_bytes: Bytes of other collections, such as running averages.
        outputs: Shapes and dtypes of the outputs, for the batch.
        n_rows: Rows of the batch.
        flops: Floating point operations of one forward pass over the batch, before optimizations.
    """

    rows: tuple[ParameterRow, ...]
    n_bytes: int
    n_variable_bytes: int
    outputs: str
    n_rows: int
    flops: float

    @property
    def n_params(self) -> int:
        """Number of trained numbers."""
        return sum(row.size for row in self.rows)

    def __str__(self) -> str:
        table = [("parameter", "shape", "dtype", "size", "scale", "role")]
        for row in self.rows:
            scale = "" if row.scale is None else f"{row.scale:.3g}"
            table.append((row.name, str(row.shape), row.dtype, f"{row.size:,}", scale, row.role))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        lines.append(f"{self.n_params:,} parameters, {_bytes_text(self.n_bytes)}")
        if self.n_variable_bytes:
            lines.append(f"Other variables: {_bytes_text(self.n_variable_bytes)}")
        lines.append(f"Outputs for {self.n_rows} rows: {self.outputs.removeprefix('batch ')}")
        lines.append(f"Forward pass: {self.flops / self.n_rows:,.4g} FLOPs per row")
        return "\n".join(lines)

    __repr__ = __str__


def summary(
    model: Any,
    batch: Any,
    *,
    loss: str | Callable[..., Any] | None = None,
    apply: Callable[..., Any] | None = None,
) -> ModelSummary:
    """Summarises a model: parameters, shapes, sizes, scales, roles, outputs and FLOPs.

    Nothing is initialised or run; shapes are enough.

    Args:
        model: A model of any library, as for `TrainLoop`.
        batch: A batch `(inputs, targets)`, an array of inputs, or their shapes as
            `jax.ShapeDtypeStruct`.
        loss: The loss, as for `fit`. Scales and roles are found only if it is known, since they
            depend on it; it needs a batch with targets.
        apply: The function that runs the model, if `model` does not include it.

    >>> import numpy as np
    >>> from flax import nnx
    >>> print(summary(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), np.zeros((8, 4), np.float32)))
    parameter  shape   dtype    size  scale  role
    bias       (2,)    float32  2
    kernel     (4, 2)  float32  8
    10 parameters, 40 B
    Outputs for 8 rows: float32[8,2]
    Forward pass: 18 FLOPs per row
    """
    if hasattr(batch, "shape"):
        batch = (batch, ())
    fns = any_model.as_model_fns(model, apply)
    inputs, _ = batches.split_batch(batch)
    key = jax.random.key(0)
    params, variables = jax.eval_shape(fns.init, key, inputs)

    def forward(params: Any, variables: Any, inputs: Any) -> Any:
        return run_model(fns, params, variables, inputs, rng=key, train=False)[0]

    lowered = jax.jit(forward).lower(params, variables, inputs)
    outputs = jax.eval_shape(forward, params, variables, inputs)
    scale_rows: dict[str, Any] = {}
    if loss is not None:
        rows = scales.find_scales(model, loss_names.find_loss(loss), batch, apply=apply)
        scale_rows = {"/".join(row.name): row for row in rows}
    return ModelSummary(
        rows=tuple(
            ParameterRow(
                name=name,
                shape=tuple(leaf.shape),
                dtype=str(leaf.dtype),
                scale=scale_rows[name].eta if name in scale_rows else None,
                role=str(scale_rows[name].role) if name in scale_rows else "",
            )
            for name, leaf in trees.flatten_named(params).items()
        ),
        n_bytes=trees.n_bytes(params),
        n_variable_bytes=trees.n_bytes(variables),
        outputs=batches.describe(outputs[0] if len(outputs) == 1 else outputs),
        n_rows=batches.n_rows(inputs),
        flops=float((lowered.cost_analysis() or {}).get("flops", math.nan)),
    )


def _bytes_text(n: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"
