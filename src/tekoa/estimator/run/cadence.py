"""Checks and permanent copies at independent intervals."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from tekoa.extensions.serial import Stage
from tekoa.loop import train_metrics
from tekoa.loop.checkpoint import Summary
from tekoa.loop.train import TrainLoop


def steps_between(check_every: int, save_every: int | None) -> int:
    """Returns the longest checkpoint interval that divides both.

    >>> steps_between(10, 4), steps_between(10, None)
    (2, 10)
    """
    return check_every if save_every is None else math.gcd(check_every, save_every)


def checks(
    loop: TrainLoop, *, check_every: int, save_every: int | None, save: Stage
) -> Iterator[Summary]:
    """Trains and yields a checkpoint at every check and at the end.

    Args:
        loop: A loop whose checkpoints are `steps_between` apart.
        check_every: Steps between two checks.
        save_every: Steps between two copies; None: no copies.
        save: Stores a copy.
    """
    period: list[Summary] = []
    for checkpoint in loop:
        period.append(checkpoint)
        if save_every is not None and checkpoint.step % save_every == 0:
            save(checkpoint)
        if checkpoint.step % check_every == 0:
            yield merge(period)
            period = []
    if period:
        yield merge(period)


def merge(summaries: Sequence[Summary]) -> Summary:
    """Returns the last of several checkpoints, with the metrics of all their steps."""
    if len(summaries) == 1:
        return summaries[0]
    last = summaries[-1]
    n_steps = sum(summary.n_completed_steps for summary in summaries)

    def mean(name: str) -> float:
        totals = (s.metrics["train"][name] * s.n_completed_steps for s in summaries)
        return sum(totals) / n_steps

    means = {
        name: mean(name)
        for name in last.metrics["train"]
        if name not in train_metrics.OF_LAST_STEP
        and all(name in s.metrics["train"] for s in summaries)
    }
    return dataclasses.replace(
        last,
        n_completed_steps=n_steps,
        elapsed_time=sum(summary.elapsed_time for summary in summaries),
        compile_time=sum(summary.compile_time for summary in summaries),
        data_time=sum(summary.data_time for summary in summaries),
        metrics={**last.metrics, "train": {**last.metrics["train"], **means}},
    )
