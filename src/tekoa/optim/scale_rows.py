"""From a traced model to the rows of its table: read it, settle each parameter."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tekoa.core import trees
from tekoa.optim import (
    scale_consume,
    scale_contract,
    scale_control,
    scale_moves,
    scale_reader,
    scale_uses,
    scale_values,
    scale_views,
)
from tekoa.optim.scale_table import ScaleRow

INITIAL_RMS = 0.02  # Of parameters known by shape only; read by functions such as exp alone.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What one reading of the model found, by position of the parameter."""

    ledger: scale_uses.Ledger
    placed: Mapping[int, scale_uses.Placement]
    tied: Mapping[int, float]  # Scales of embeddings that are also contracted.
    deps: int  # Which parameters the outputs depend on.


def find_rows(
    jaxpr: core.ClosedJaxpr,
    names: Sequence[trees.Name],
    leaves: Sequence[Any],
    arrays: Sequence[Any],
) -> list[ScaleRow]:
    """Reads a model and gives one row per parameter.

    Args:
        jaxpr: The traced model; takes the parameters, then the arrays of the batch.
        names: The parameters' names.
        leaves: The parameters, as arrays or shapes.
        arrays: The batch, as arrays or shapes.

    Raises:
        ValueError: If the outputs do not depend on any parameter.
    """
    reading = _read(jaxpr, leaves, arrays, known={}, targets={})
    if reading.tied:
        # Once more, so that what follows a tied embedding sees the scale it really has.
        reading = _read(jaxpr, leaves, arrays, **_shared(reading))
    if reading.deps <= scale_values.BATCH:
        raise ValueError(
            "The model's output does not depend on any parameter in a way that has a gradient. "
            "Check that fn uses the params it is given, and that its output is floating."
        )
    return [_row(reading, i, name, leaf) for i, (name, leaf) in enumerate(zip(names, leaves))]


def _read(
    jaxpr: core.ClosedJaxpr,
    leaves: Sequence[Any],
    arrays: Sequence[Any],
    *,
    known: Mapping[int, float],
    targets: Mapping[int, float],
) -> Reading:
    reader = scale_reader.Reader(
        always=scale_control.RULES | scale_contract.RULES,
        on_views=scale_moves.RULES | scale_consume.RULES,
        shapes_only=any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays),
        known=known,
        targets=targets,
    )
    outs = reader.run(jaxpr, _inputs(reader, leaves, arrays))
    placed, tied = {}, {}
    for i, uses in reader.ledger.uses.items():
        placed[i] = scale_uses.place(uses, tuple(leaves[i].shape))
        if placed[i].eta < 1 and any(use.kind is scale_uses.LOOKED_UP for use in uses):
            tied[i] = placed[i].eta
    deps = scale_reader.union(outs)
    return Reading(ledger=reader.ledger, placed=placed, tied=tied, deps=deps)


def _shared(reading: Reading) -> dict[str, dict[int, float]]:
    """Shares the scale of a tied embedding with the layer whose result it is contracted with.

    Unit logits fix the product of the two scales only. Where the result also stands beside
    the embedding's rows, as the output of an LSTM does at the next step, the two share it
    evenly: with n terms, the rows and the result have rms n**-1/4.
    """
    known, targets = {}, {}
    for i, eta in reading.tied.items():
        fed_by = [
            kernel
            for kernel in reading.ledger.fed_by.get(i, ())
            if kernel != i and any({i, kernel} <= group for group in reading.ledger.neighbours)
        ]
        known[i] = math.sqrt(eta) if fed_by else eta
        targets |= dict.fromkeys(fed_by, math.sqrt(eta))
    return {"known": known, "targets": targets}


def _inputs(
    reader: scale_reader.Reader, leaves: Sequence[Any], arrays: Sequence[Any]
) -> list[scale_values.Value]:
    values = []
    for i, leaf in enumerate(leaves):
        value = _input(reader, leaf, scale_values.param_bit(i))
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            value = scale_reader.with_views(value, [scale_views.View.whole(i, leaf.shape)])
        values.append(value)
    return values + [_input(reader, x, scale_values.BATCH) for x in arrays]


def _input(reader: scale_reader.Reader, x: Any, deps: int) -> scale_values.Value:
    data = x
    if isinstance(x, jax.ShapeDtypeStruct):
        data = _unknown(reader, x, 1.0 if deps == scale_values.BATCH else INITIAL_RMS)
    elif reader.shapes_only and math.prod(x.shape) > scale_reader.HUGE:
        data = scale_values.Bag(scale_values.as_samples(x))
    return scale_values.Value(shape=tuple(x.shape), dtype=x.dtype, data=data, deps=deps)


def _unknown(reader: scale_reader.Reader, x: jax.ShapeDtypeStruct, rms: float) -> Any:
    """Makes data for an input of which only the shape is known."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return scale_values.unit_bag(x.dtype, reader.rng())
    if reader.shapes_only:
        samples = scale_values.unit_bag(x.dtype, reader.rng()).samples
        return scale_values.Bag((samples * rms).astype(x.dtype))
    return jnp.asarray(rms * reader.rng().standard_normal(x.shape, np.float32), x.dtype)


def _row(reading: Reading, i: int, name: trees.Name, leaf: Any) -> ScaleRow:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return _fallback_row(name, leaf, f"it is of {leaf.dtype}, which has no gradient")
    if not reading.deps & scale_values.param_bit(i):
        note = f" ({reading.ledger.notes[i]})" if i in reading.ledger.notes else ""
        return _fallback_row(name, leaf, f"unused, the output does not depend on it{note}")
    if i not in reading.placed:
        reason = reading.ledger.notes.get(i, "used in no way that has a rule")
        return _fallback_row(name, leaf, reason)
    placement = reading.placed[i]
    return ScaleRow(
        name=name,
        shape=tuple(leaf.shape),
        eta=placement.eta,
        slot_shape=placement.slot_shape,
        reason=placement.reason,
        eta_by_slice=placement.eta_by_slice,
    )


def _fallback_row(name: trees.Name, leaf: Any, reason: str) -> ScaleRow:
    shape = tuple(leaf.shape)
    is_known = not isinstance(leaf, jax.ShapeDtypeStruct)
    rms = math.sqrt(scale_values.mean_square(leaf)) if is_known else 0.0
    if rms:
        taken = "its initial rms is taken"
    else:
        taken = f"1/sqrt(fan-in) is taken, its initial rms is {'0' if is_known else 'not known'}"
    return ScaleRow(
        name=name,
        shape=shape,
        eta=rms or math.prod(shape[:-1]) ** -0.5,
        slot_shape=shape if len(shape) > 1 else (),
        reason=f"{reason}; {taken}",
        placed=False,
    )
