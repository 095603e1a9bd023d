"""One line of metrics per check, in the log of a run."""

import math
import sys

from tekoa import hosts
from tekoa.estimator.cli import output
from tekoa.estimator.run import cadence
from tekoa.loop.checkpoint import Checkpoint, as_summary

# In TensorBoard only: they say how training runs, not how well the model does.
_NOT_LOGGED = (*cadence.OF_LAST_STEP, "seconds_per_step")


def log_check(checkpoint: Checkpoint) -> Checkpoint:
    """Prints the metrics of a checkpoint to standard error, in process 0 only."""
    line = check_line(checkpoint)
    if line and hosts.current().is_writer:
        print(line, file=sys.stderr, flush=True)
    return checkpoint


def print_check_as_json(checkpoint: Checkpoint) -> Checkpoint:
    """Prints the step and the metrics of a checkpoint as a line of JSON, in process 0 only."""
    metrics = {k: x if math.isfinite(x) else None for k, x in _metrics(checkpoint).items()}
    if metrics and hosts.current().is_writer:
        output.print_json({"step": checkpoint.step, **metrics})
    return checkpoint


def _metrics(checkpoint: Checkpoint) -> dict[str, float]:
    return {
        "train_loss" if name == "loss" else name: value
        for name, value in as_summary(checkpoint).metrics.get("train", {}).items()
        if name not in _NOT_LOGGED
    }


def check_line(checkpoint: Checkpoint) -> str:
    """Returns the losses and other metrics of a checkpoint; empty if it has none."""
    metrics = _metrics(checkpoint)
    # The loss of training first, then those of validation.
    names = sorted(metrics, key=lambda name: (name != "train_loss", name.startswith("valid_")))
    values = [f"{name}: {metrics[name]:.6g}" for name in names]
    if not values:
        return ""
    name, _, first = values[0].partition(": ")
    return ", ".join([f"{name} at step {checkpoint.step}: {first}", *values[1:]])
