"""A sweep in rounds: Optuna chooses the runs of each round from the results of those before.

What it chooses is a function of the seed and of these results, so that nothing of Optuna is
stored: a sweep that was killed chooses the same runs again.
"""

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekoa import _extras
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.sweep import grid
from tekoa.estimator.sweep.lanes import Goal, Outcome, Sweep
from tekoa.estimator.sweep.record import SweepRecord
from tekoa.hosts.signals import StopFlag

_AT_ONCE = 8

Values = Mapping[str, str]


def parse_count(text: str | int) -> tuple[int, int]:
    """Parses RUNS or RUNS:AT_ONCE; returns the number of runs, and of those in one round.

    Raises:
        UsageError: If the text has another form.

    >>> parse_count('32'), parse_count('30:16')
    ((32, 8), (30, 16))
    """
    words = str(text).split(":")
    if len(words) > 2 or not all(word.isdigit() and int(word) for word in words):
        raise UsageError(f"--optuna must be RUNS or RUNS:AT_ONCE, such as 32:8, got {text!r}.")
    return int(words[0]), int(words[1]) if len(words) > 1 else _AT_ONCE


class Rounds:
    """Trains rounds of runs, as `Sweep` trains the runs of a grid.

    Args:
        make_sweep: Returns the sweep of some lanes.
        space: What to choose from.
        directory: The directory of the sweep.
        goal: How runs are compared.
        counts: The number of runs, and of those in one round.
        seeds: Each choice is trained with all of these; Optuna is told the mean.
    """

    def __init__(
        self,
        make_sweep: Callable[[Sequence[grid.Lane]], Sweep],
        space: Sequence[grid.Range | grid.Axis],
        directory: pathlib.Path,
        *,
        goal: Goal,
        counts: tuple[int, int],
        seeds: Sequence[int],
    ):
        self._make_sweep, self._space, self._goal = make_sweep, space, goal
        self._n_runs, self._n_at_once = counts
        self._seeds, self._directory = seeds, directory

    def train(self, stop_flag: StopFlag) -> None:
        """Trains all rounds, or until a stop is requested."""
        while True:
            record = SweepRecord.read(self._directory)
            n = min(self._n_at_once, self._n_runs - sum(map(len, record.rounds)))
            if n <= 0 or stop_flag.is_set():
                return
            results = [self._result(values) for done in record.rounds for values in done]
            seed = self._seeds[0] + len(results)
            chosen = choose(self._space, results, n=n, seed=seed, is_max=self._goal.is_max)
            self._make_sweep(self._lanes(chosen)).train(stop_flag)
            if stop_flag.is_set():
                return
            record = SweepRecord.read(self._directory)
            record.rounds.append([dict(values) for values in chosen])
            record.halved = []
            record.write()

    def outcomes(self) -> list[Outcome]:
        """Reads the results of all rounds, best first."""
        rounds = SweepRecord.read(self._directory).rounds
        return self._outcomes([values for done in rounds for values in done])

    def _outcomes(self, chosen: Sequence[Values]) -> list[Outcome]:
        return self._make_sweep(self._lanes(chosen)).outcomes()

    def _lanes(self, chosen: Sequence[Values]) -> list[grid.Lane]:
        """Returns the lanes of some choices; those that were chosen twice are trained once."""
        n = len(self._seeds)
        lanes = [grid.lane_of(values, seed, n) for values in chosen for seed in self._seeds]
        return list({lane.name: lane for lane in lanes}.values())

    def _result(self, values: Values) -> tuple[Values, float | None]:
        """Returns the mean over the seeds; None if one of the runs was stopped."""
        outcomes = self._outcomes([values])
        results = [o.value for o in outcomes if o.value is not None and not o.stopped]
        return values, statistics.fmean(results) if len(results) == len(outcomes) else None


def choose(
    space: Sequence[grid.Range | grid.Axis],
    results: Sequence[tuple[Values, float | None]],
    *,
    n: int,
    seed: int,
    is_max: bool,
) -> list[dict[str, str]]:
    """Returns the next values to try, as Optuna's TPE sampler chooses them.

    Args:
        space: What to choose from.
        results: Values that were tried, with the metric; None for a run that was stopped.
        n: How many to return.
        seed: The seed of the sampler.
        is_max: Whether the highest metric is the best.

    Raises:
        MissingPackageError: If Optuna is not installed.
    """
    optuna: Any = _extras.require("optuna", extra="optuna", what="--optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = {part.name: _distribution(optuna, part) for part in space}
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed),
        direction="maximize" if is_max else "minimize",
    )
    states = optuna.trial.TrialState
    for values, metric in results:
        trial = optuna.trial.create_trial(
            params={name: _parsed(kinds[name], text) for name, text in values.items()},
            distributions=kinds,
            value=metric,
            state=states.PRUNED if metric is None else states.COMPLETE,
        )
        study.add_trial(trial)
    asked = [study.ask(kinds).params for _ in range(n)]
    return [{name: _text(params[name]) for name in kinds} for params in asked]


def _distribution(optuna: Any, part: grid.Range | grid.Axis) -> Any:
    kinds = optuna.distributions
    if isinstance(part, grid.Axis):
        return kinds.CategoricalDistribution(part.values)
    if part.is_int:
        return kinds.IntDistribution(round(part.low), round(part.high), log=part.is_log)
    return kinds.FloatDistribution(part.low, part.high, log=part.is_log)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _parsed(kind: Any, text: str) -> Any:
    """Returns a value as Optuna knows it; the text of a number is rounded."""
    if not hasattr(kind, "low"):
        return text
    return min(max(type(kind.low)(text), kind.low), kind.high)
