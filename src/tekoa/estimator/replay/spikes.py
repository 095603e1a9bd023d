"""Finds where the loss of a run rose far beyond its usual noise."""

import itertools
import math
import statistics
from collections.abc import Mapping

import numpy as np

from tekoa.core import trees
from tekoa.estimator.replay.segment import Replayer
from tekoa.extensions import metrics_file
from tekoa.store.formats import step as steps
from tekoa.store.read import json_lines, load

# The loss of a small batch varies from check to check. So a spike is a rise by this factor above
# the highest of the last checks (a larger one while there are few), by several times the usual
# change from one check to the next, and to a good part of the first loss.
_FACTOR, _FACTOR_AT_FIRST = 3.0, 10.0
_N_CHECKS = 4
_N_USUAL_CHANGES = 4.0
_PART_OF_FIRST = 0.25


def explain(replayer: Replayer) -> list[str]:
    """Describes the largest spike between two checkpoints of a run; empty if there is none."""
    losses = {}
    for step, path in sorted(replayer.stored.items()):
        loss = steps.open_step(path, verify="none").index.metrics.get("train/loss")
        if loss is not None:
            losses[step] = loss
    # The first checkpoints may be removed by now; their losses are still in the file.
    rows = json_lines.read_rows(replayer.directory / metrics_file.FILE_NAME)
    history = {row["step"]: row["train/loss"] for row in rows if row.get("train/loss")} | losses
    rises = {
        (before, after): rise
        for before, after in itertools.pairwise(losses)
        if (rise := rise_of(history, before, losses[after])) is not None
    }
    if not rises:
        return []
    before, after = max(rises, key=lambda pair: rises[pair])
    norms = [_norms(replayer, step) for step in (before, after)]
    ratios = {name: norms[1][name] / max(norms[0][name], 1e-30) for name in norms[0]}
    name = max(ratios, key=lambda name: abs(np.log(max(ratios[name], 1e-30))))
    return [
        f"Between steps {before} and {after} the loss rose from {losses[before]:.4g} to "
        f"{losses[after]:.4g}.",
        f"The norm that changed most is that of {name}: from {norms[0][name]:.4g} to "
        f"{norms[1][name]:.4g}.",
    ]


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


def _norms(replayer: Replayer, step: int) -> dict[str, float]:
    opened = steps.open_step(replayer.stored[step])
    params = load.load_step(opened, items=["model_params"])["model_params"]
    named = trees.named_leaves(params)
    return {"/".join(n): float(np.linalg.norm(x.astype(np.float64))) for n, x in named.items()}
