"""From a traced model to the rows of its table."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tekoa.core import trees
from tekoa.optim.scales import eager, interpreter, roles, views
from tekoa.optim.scales import uses as uses_lib
from tekoa.optim.scales import values as values_lib
from tekoa.optim.scales.rules import contractions, control_flow, moves, pointwise
from tekoa.optim.scales.table import ScaleRow

# Assumed rms of parameters without values; it matters only for functions like exp.
INITIAL_RMS = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadResult:
    """The result of interpreting the model once. Parameters are numbered by position."""

    record: uses_lib.UseRecord
    decisions: Mapping[int, uses_lib.ScaleDecision]
    tied_scales: Mapping[int, float]  # Of embeddings that are also contracted.
    deps: int  # Which parameters the outputs depend on, as in `Value.deps`.


def find_rows(
    jaxpr: core.ClosedJaxpr,
    names: Sequence[trees.Name],
    leaves: Sequence[Any],
    arrays: Sequence[Any],
) -> list[ScaleRow]:
    """Interprets a model and returns one row per parameter.

    Args:
        jaxpr: The traced model; its inputs are `leaves`, then `arrays`.
        names: The parameters' names.
        leaves: The parameters, as arrays or shapes.
        arrays: The batch, as arrays or shapes.

    Raises:
        ValueError: If the outputs do not depend on any parameter.
    """
    result = _read(jaxpr, leaves, arrays, tied_scales={}, targets={})
    if result.tied_scales:
        # Again, so that layers after a tied embedding see the scale it really has.
        result = _read(jaxpr, leaves, arrays, **_share_tied_scales(result))
    if result.deps <= values_lib.BATCH:
        raise ValueError(
            "The model's output does not depend on any parameter in a differentiable way. "
            "Check that fn uses its params argument and returns floating-point values."
        )
    return [_row(result, i, name, leaf) for i, (name, leaf) in enumerate(zip(names, leaves))]


def _read(
    jaxpr: core.ClosedJaxpr,
    leaves: Sequence[Any],
    arrays: Sequence[Any],
    *,
    tied_scales: Mapping[int, float],
    targets: Mapping[int, float],
) -> ReadResult:
    reader = interpreter.Reader(
        always=control_flow.RULES | contractions.RULES,
        on_views=moves.RULES | pointwise.RULES,
        shapes_only=any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays),
        tied_scales=tied_scales,
        targets=targets,
    )
    outputs = [reader.settle(x) for x in reader.run(jaxpr, _inputs(reader, leaves, arrays))]
    decisions, new_tied_scales = {}, {}
    for i, pools in reader.record.by_param.items():
        decisions[i] = uses_lib.decide(pools, tuple(leaves[i].shape))
        if decisions[i].eta < 1 and any(use.kind is uses_lib.LOOKED_UP for use in pools):
            new_tied_scales[i] = decisions[i].eta
    return ReadResult(
        record=reader.record,
        decisions=decisions,
        tied_scales=new_tied_scales,
        deps=interpreter.union(outputs),
    )


def _share_tied_scales(result: ReadResult) -> dict[str, dict[int, float]]:
    """Divides the scale of a tied embedding between it and the layer that feeds the logits.

    Unit logits fix only the product of the embedding's scale and the rms of the layer's
    output. If the output is also added to or concatenated with rows of the embedding, as the
    state of an LSTM is, both should have the same rms: n**-1/4 for logits of n terms.
    """
    tied_scales, targets = {}, {}
    for i, eta in result.tied_scales.items():
        feeding = [
            kernel
            for kernel in result.record.fed_by.get(i, ())
            if kernel != i and any({i, kernel} <= group for group in result.record.neighbours)
        ]
        tied_scales[i] = math.sqrt(eta) if feeding else eta
        targets |= dict.fromkeys(feeding, math.sqrt(eta))
        # Positions that are added to rows of the table would hide them if they were larger.
        beside = {j for group in result.record.neighbours if i in group for j in group} - {i}
        rows = [j for j in sorted(beside) if _is_only_looked_up(result.record, j)]
        tied_scales |= dict.fromkeys(rows, tied_scales[i])
        targets |= dict.fromkeys(rows, tied_scales[i])
    return {"tied_scales": tied_scales, "targets": targets}


def _is_only_looked_up(record: uses_lib.UseRecord, param: int) -> bool:
    return all(use.kind is uses_lib.LOOKED_UP for use in record.by_param.get(param, ()))


def _inputs(
    reader: interpreter.Reader, leaves: Sequence[Any], arrays: Sequence[Any]
) -> list[values_lib.Value]:
    values = []
    for i, leaf in enumerate(leaves):
        value = _input(reader, leaf, values_lib.param_bit(i))
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            value = interpreter.with_views(value, [views.View.whole(i, leaf.shape)])
        values.append(value)
    return values + [_input(reader, x, values_lib.BATCH) for x in arrays]


def _input(reader: interpreter.Reader, x: Any, deps: int) -> values_lib.Value:
    data = eager.as_numpy(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        data = _draw_data(reader, x, 1.0 if deps == values_lib.BATCH else INITIAL_RMS)
    elif reader.shapes_only and math.prod(x.shape) > interpreter.HUGE:
        data = values_lib.Samples(values_lib.as_samples(x))
    return values_lib.Value(shape=tuple(x.shape), dtype=x.dtype, data=data, deps=deps)


def _draw_data(reader: interpreter.Reader, x: jax.ShapeDtypeStruct, rms: float) -> Any:
    """Draws data for an input of which only the shape is known."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return values_lib.unit_samples(x.dtype, reader.rng())
    if reader.shapes_only:
        samples = values_lib.unit_samples(x.dtype, reader.rng()).samples
        return values_lib.Samples((samples * rms).astype(x.dtype))
    return jnp.asarray(rms * reader.rng().standard_normal(x.shape, np.float32), x.dtype)


def _row(result: ReadResult, i: int, name: trees.Name, leaf: Any) -> ScaleRow:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return _fallback_row(name, leaf, f"its dtype {leaf.dtype} has no gradient")
    if not result.deps & values_lib.param_bit(i):
        note = f" ({result.record.notes[i]})" if i in result.record.notes else ""
        return _fallback_row(name, leaf, f"unused, the output does not depend on it{note}")
    if i not in result.decisions:
        note = result.record.notes.get(i, "used in no way that has a rule")
        return _fallback_row(name, leaf, note)
    decision, shape = result.decisions[i], tuple(leaf.shape)
    role = dataclasses.replace(
        roles.complete(decision.use.role, shape),
        is_output=not result.record.is_followed(i, decision.use.kind),
        is_tied=decision.is_tied,
        is_recurrent=result.record.is_recurrent(i),
    )
    return ScaleRow(
        name=name,
        shape=shape,
        eta=decision.eta,
        eta_by_slice=decision.eta_by_slice,
        slot_shape=decision.slot_shape,
        role=role,
        reason=decision.reason,
        depth=result.record.depth_of_param(i),
        n_branches=result.record.n_branches if result.record.is_residual.get(i) else 1,
        in_branch=result.record.is_in_branch(i),
    )


def _fallback_row(name: trees.Name, leaf: Any, reason: str) -> ScaleRow:
    """Returns the row of a parameter without a rule: its initial rms or 1/sqrt(fan-in)."""
    shape = tuple(leaf.shape)
    has_values = not isinstance(leaf, jax.ShapeDtypeStruct)
    rms = math.sqrt(values_lib.mean_square(leaf)) if has_values else 0.0
    if rms:
        fallback = "using its initial rms"
    else:
        fallback = f"using 1/sqrt(fan-in), its initial rms is {'0' if has_values else 'unknown'}"
    return ScaleRow(
        name=name,
        shape=shape,
        eta=rms or math.prod(shape[:-1]) ** -0.5,
        slot_shape=shape if len(shape) > 1 else (),
        role=roles.complete(roles.UNKNOWN, shape),
        reason=f"{reason}; {fallback}",
        placed=False,
    )
