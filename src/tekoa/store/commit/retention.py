"""Which steps to keep.

A step is kept if any rule selects it, if it is the newest, or if it contains a file named
PINNED. A metric that is NaN or Inf is never the best.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Protocol

from tekoa.store.commit import paths
from tekoa.store.commit.score import Mode, check_mode

PINNED = "PINNED"

# Metrics by name, by step.
Metrics = Mapping[int, Mapping[str, float]]


class Rule(Protocol):
    """A rule that selects the steps to keep."""

    def select(self, metrics: Metrics) -> Iterable[int]:
        """Returns the steps to keep, out of the keys of `metrics`."""
        ...


@dataclasses.dataclass(frozen=True)
class KeepLast:
    """Keeps the n highest steps.

    >>> sorted(KeepLast(2).select({1: {}, 5: {}, 3: {}}))
    [3, 5]
    """

    n: int

    def __post_init__(self):
        _check_positive("n", self.n)

    def select(self, metrics: Metrics) -> Iterable[int]:
        """Returns the steps to keep."""
        return sorted(metrics)[-self.n :]


@dataclasses.dataclass(frozen=True)
class KeepEvery:
    """Keeps every step that is a multiple of `n_steps`; 1 keeps all.

    >>> KeepEvery(10).select({5: {}, 10: {}, 20: {}})
    [10, 20]
    """

    n_steps: int

    def __post_init__(self):
        _check_positive("n_steps", self.n_steps)

    def select(self, metrics: Metrics) -> Iterable[int]:
        """Returns the steps to keep."""
        return [step for step in metrics if step % self.n_steps == 0]


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Keeps the n steps with the best finite value of a metric; ties go to the earlier step.

    >>> KeepBest('loss', mode='min').select({1: {'loss': 0.5}, 2: {'loss': math.nan}, 3: {}})
    [1]
    """

    metric: str
    mode: Mode
    n: int = 1

    def __post_init__(self):
        _check_positive("n", self.n)
        check_mode(self.mode)

    def select(self, metrics: Metrics) -> Iterable[int]:
        """Returns the steps to keep."""
        sign = 1 if self.mode == "min" else -1
        scored = [
            (sign * values[self.metric], step)
            for step, values in metrics.items()
            if math.isfinite(values.get(self.metric, math.nan))
        ]
        return [step for _, step in sorted(scored)[: self.n]]


def to_remove(
    rules: Iterable[Rule],
    metrics: Metrics,
    directory: str | pathlib.Path,
    *,
    committed: int | None = None,
    keep_newest: bool = True,
) -> list[int]:
    """Lists the steps that no rule keeps, lowest first.

    Args:
        rules: The rules.
        metrics: The committed steps with their metrics.
        directory: The directory of the steps, to look for PINNED files.
        committed: The step that was just committed; it is kept whatever its number.
        keep_newest: Whether the highest step is kept whatever the rules select. It is kept in
            any case if they select nothing.
    """
    if not metrics:
        return []
    keep = set().union(*(rule.select(metrics) for rule in rules))
    if keep_newest or not keep:
        keep.add(max(metrics))
    keep.add(committed)
    return [
        step
        for step in sorted(set(metrics) - keep)
        if not (paths.step_dir(directory, step) / PINNED).exists()
    ]


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
