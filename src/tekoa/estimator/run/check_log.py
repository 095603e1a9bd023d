"""One line of JSON per check, for `--json`."""

import math

from tekoa import hosts
from tekoa.estimator.cli import output
from tekoa.loop import train_metrics
from tekoa.loop.checkpoint import Checkpoint, as_summary
from tekoa.loop.media import Text


def print_check_as_json(checkpoint: Checkpoint) -> Checkpoint:
    """Prints the step, metrics and texts of a checkpoint as a line of JSON, in process 0 only."""
    media = as_summary(checkpoint).media
    texts = {name: text.value for name, text in media.items() if isinstance(text, Text)}
    metrics = {k: x if math.isfinite(x) else None for k, x in _metrics(checkpoint).items()}
    if (metrics or texts) and hosts.current().is_writer:
        output.print_json({"step": checkpoint.step, **metrics, **texts})
    return checkpoint


def _metrics(checkpoint: Checkpoint) -> dict[str, float]:
    return {
        "train_loss" if name == "loss" else name: value
        for name, value in as_summary(checkpoint).metrics.get("train", {}).items()
        if name not in train_metrics.DIAGNOSTICS
    }
