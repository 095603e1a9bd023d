"""Checks and copies at steps of their own: neither need be a multiple of the other."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from tekoa.extensions.base import Stage
from tekoa.loop.checkpoint import Summary
from tekoa.loop.train import TrainLoop

# Of the last step; all other numbers are means over the steps.
_OF_LAST_STEP = ("gradients_l2norm", "weights_l2norm", "skipped_steps", "bad_steps")


def steps_between(check_every: int, save_every: int | None) -> int:
    """How far apart a loop's checkpoints must be to meet both.

    >>> steps_between(10, 4), steps_between(10, None)
    (2, 10)
    """
    return check_every if save_every is None else math.gcd(check_every, save_every)


def checks(
    loop: TrainLoop, *, check_every: int, save_every: int | None, save: Stage
) -> Iterator[Summary]:
    """Trains, and yields a checkpoint at every check and at the end.

    Args:
        loop: Its checkpoints are `steps_between` apart.
        check_every: Steps between two checks.
        save_every: Steps between two copies; None: none are wanted.
        save: Stores a copy, of steps that are checks too.
    """
    parts: list[Summary] = []
    for checkpoint in loop:
        parts.append(checkpoint)
        if save_every is not None and checkpoint.step % save_every == 0:
            save(checkpoint)
        if checkpoint.step % check_every == 0:
            yield joined(parts)
            parts = []
    if parts:
        yield joined(parts)


def joined(parts: Sequence[Summary]) -> Summary:
    """Gives the last of several checkpoints, with the numbers of all steps since the first."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    n_steps = sum(part.n_completed_steps for part in parts)
    means = {
        name: sum(part.metrics["train"][name] * part.n_completed_steps for part in parts) / n_steps
        for name in last.metrics["train"]
        if name not in _OF_LAST_STEP and all(name in part.metrics["train"] for part in parts)
    }
    return dataclasses.replace(
        last,
        n_completed_steps=n_steps,
        elapsed_time=sum(part.elapsed_time for part in parts),
        metrics={**last.metrics, "train": {**last.metrics["train"], **means}},
    )
