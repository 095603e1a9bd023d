"""Interleaved timing: every contestant runs once per round, and medians are compared."""

import statistics
import time
from collections.abc import Callable, Mapping


def interleave(
    contestants: Mapping[str, Callable[[], object]], *, n_rounds: int, n_warm: int = 2
) -> dict[str, list[float]]:
    """Runs all contestants alternately for `n_rounds` rounds.

    Args:
        contestants: Name to a function that returns when its work is done.
        n_rounds: Measured rounds.
        n_warm: Warm-up rounds that are not measured.

    Returns:
        Seconds per call, by name, one entry per round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(n_warm + n_rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_ >= n_warm:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    """Returns the median ratio of the times of `name` and `base` in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def milliseconds(values: list[float]) -> float:
    """Returns the median in milliseconds."""
    return 1e3 * statistics.median(values)
