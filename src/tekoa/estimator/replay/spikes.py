"""Finds where the loss of a run rose far beyond its usual noise."""

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tekoa.core import trees
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.replay.segment import Replayer, has_data_ended
from tekoa.extensions import checkpoint_files, metrics_file
from tekoa.store.formats import step as steps
from tekoa.store.read import json_lines, load

# The loss of a small batch varies from check to check. So a spike is a rise by this factor above
# the highest of the last checks (a larger one while there are few), by several times the usual
# change from one check to the next, and to a good part of the first loss.
_FACTOR, _FACTOR_AT_FIRST = 3.0, 10.0
_N_CHECKS = 4
_N_USUAL_CHANGES = 4.0
_PART_OF_FIRST = 0.25
# The loss at the start is known from a few batches only.
_FACTOR_FROM_START = 100.0


def explain(replayer: Replayer) -> list[str]:
    """Describes the largest spike between two checkpoints of a run; empty if there is none."""
    losses = _stored_losses(replayer)
    history = _history(replayer) | losses
    rises = {
        (before, after): rise
        for before, after in itertools.pairwise(losses)
        if (rise := rise_of(history, before, losses[after])) is not None
    }
    if not rises:
        return []
    before, after = max(rises, key=lambda pair: rises[pair])
    norms = [_norms(_stored_params(replayer, step)) for step in (before, after)]
    return [
        f"Between steps {before} and {after} the loss rose from {losses[before]:.4g} to "
        f"{losses[after]:.4g}.",
        _largest_change(*norms),
    ]


def explain_start(replayer: Replayer) -> list[str]:
    """Describes a loss that rose before it was first recorded; empty if it did not."""
    history = _history(replayer) | _stored_losses(replayer)
    recorded, stored = min(history, default=0), [step for step in replayer.stored if step]
    if not (recorded and stored) or not (replayer.starts_from_scratch or 0 in replayer.stored):
        return []
    try:
        loop = replayer.loop_at(0)
    except UsageError:  # The data or the code of the first start may be gone by now.
        return []
    if "loss" not in loop.parts[0].reported:
        return []
    initial = loop.checkpoint().state
    step, first = jax.jit(loop.pure_step(on_nan="ignore")), 0.0
    for _ in range(_N_CHECKS):
        if not has_data_ended(loop):
            first = max(first, float(step(initial, loop.peek_batch())[1].loss))
            loop.next_step()
    if not 0 < _FACTOR_FROM_START * first <= history[recorded]:
        return []
    before = checkpoint_files.items_of(initial)["model_params"]
    after = _stored_params(replayer, min(stored))
    return [
        f"Between steps 0 and {recorded} the loss rose from {first:.4g} to "
        f"{history[recorded]:.4g}, and the learning rate may be too large.",
        _largest_change(_norms(before), _norms(after)),
    ]


def _stored_losses(replayer: Replayer) -> dict[int, float]:
    losses = {}
    for step, path in sorted(replayer.stored.items()):
        loss = steps.open_step(path, verify="none").index.metrics.get("train/loss")
        if loss is not None:
            losses[step] = loss
    return losses


def _history(replayer: Replayer) -> dict[int, float]:
    """Returns the losses in the file: checkpoints may be removed by now."""
    rows = json_lines.read_rows(replayer.directory / metrics_file.FILE_NAME)
    return {row["step"]: row["train/loss"] for row in rows if row.get("train/loss")}


def rise_of(history: Mapping[int, float], step: int, loss: float) -> float | None:
    """Returns by what factor a loss is above the last ones, if that is a spike; None if not.

    Args:
        history: The loss at each check, by step.
        step: The check before.
        loss: The loss at the check after it.

    >>> steady = {step: 1.0 + 0.1 * (step % 2) for step in range(10)}
    >>> rise_of(steady, 9, 2.2), rise_of(steady, 9, 11.0)
    (None, 10.0)
    """
    past = [max(loss, 1e-30) for s, loss in sorted(history.items()) if s <= step]
    rise = loss / max(past[-_N_CHECKS:])
    factor = _FACTOR if len(past) >= _N_CHECKS else _FACTOR_AT_FIRST
    changes = [abs(math.log(b / a)) for a, b in itertools.pairwise(past)]
    usual = statistics.median(changes) if changes else 0.0
    is_spike = (
        rise >= factor
        and math.log(rise) >= _N_USUAL_CHANGES * usual
        and loss >= _PART_OF_FIRST * past[0]
    )
    return rise if is_spike else None


def _stored_params(replayer: Replayer, step: int) -> Any:
    opened = steps.open_step(replayer.stored[step])
    return load.load_step(opened, items=["model_params"])["model_params"]


def _norms(params: Any) -> dict[str, float]:
    arrays = {name: np.asarray(x, np.float64) for name, x in trees.named_leaves(params).items()}
    return {"/".join(name): float(np.linalg.norm(array)) for name, array in arrays.items()}


def _largest_change(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    ratios = {name: after[name] / max(before[name], 1e-30) for name in before}
    name = max(ratios, key=lambda name: abs(np.log(max(ratios[name], 1e-30))))
    return (
        f"The norm that changed most is that of {name}: from {before[name]:.4g} to "
        f"{after[name]:.4g}."
    )
