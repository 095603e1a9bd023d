"""Stops training when a metric no longer improves, or when it reaches a value."""

import abc
import json
import math
import operator
import os
import pathlib
import re
from collections.abc import Callable

from tekoa.core import files
from tekoa.loop.checkpoint import Checkpoint, find_metric
from tekoa.store import errors
from tekoa.store.commit import durable
from tekoa.store.commit.score import Mode, check_mode

_MAX_BYTES = 2**26
_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


class Stopping(abc.ABC):
    """A stage that may end training, because of the values of a metric so far.

    Args:
        metric: Name of the metric.
        group: The metric's group.
        stop: Called once when it is time to stop, such as `train_loop.stop`.
        path: A file that stores the values, so that a resumed run stops at the same step as an
            uninterrupted one.

    Attributes:
        metric: The name of the metric.
        should_stop: Whether it is time to stop.
    """

    def __init__(
        self,
        metric: str,
        *,
        group: str,
        stop: Callable[[], object] | None,
        path: str | os.PathLike[str] | None,
    ):
        self.metric, self.should_stop = metric, False
        self._group, self._stop = group, stop
        self._path = None if path is None else files.local_path(path)
        self._values = {} if self._path is None else _read_values(self._path)

    @property
    @abc.abstractmethod
    def reason(self) -> str:
        """Why training stops, as the end of a sentence."""

    @abc.abstractmethod
    def _is_due(self) -> bool:
        """Whether the values so far are a reason to stop."""

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Records the metric of one checkpoint.

        Raises:
            LookupError: If the checkpoint has no such metric.
        """
        value = find_metric(checkpoint, self._group, self.metric)
        # A run that resumes from an older step repeats later ones.
        earlier = {step: old for step, old in self._values.items() if step < checkpoint.step}
        self._values = {**earlier, checkpoint.step: value}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self._path, json.dumps(self._values).encode())
        if self._is_due() and not self.should_stop:
            self.should_stop = True
            if self._stop is not None:
                self._stop()
        return checkpoint

    def resume(self, step: int) -> bool:
        """Forgets the values of later steps; returns whether it was time to stop at `step`."""
        self._values = {at: value for at, value in self._values.items() if at <= step}
        self.should_stop = self._is_due()
        return self.should_stop


class EarlyStopping(Stopping):
    """Requests a stop after `patience` checkpoints without an improvement.

    Args:
        metric: Name of the metric.
        patience: Number of checkpoints without improvement after which to stop.
        mode: Whether a lower ("min") or a higher ("max") value is better.
        group: The metric's group.
        min_delta: By how much a value must be better to count as an improvement.
        stop: Called once when it is time to stop, such as `train_loop.stop`.
        path: A file that stores the values so far, so that a resumed run stops at the same step
            as an uninterrupted one.

    Raises:
        ValueError: If an option is invalid, or the file was not written by `EarlyStopping`.
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int,
        mode: Mode = "min",
        group: str = "eval",
        min_delta: float = 0.0,
        stop: Callable[[], object] | None = None,
        path: str | os.PathLike[str] | None = None,
    ):
        if patience < 1:
            raise ValueError(f"patience must be 1 or more, got {patience}.")
        check_mode(mode)
        super().__init__(metric, group=group, stop=stop, path=path)
        self._patience, self._min_delta = patience, min_delta
        self._sign = 1 if mode == "min" else -1

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        return self._best_and_n_since()[0]

    @property
    def reason(self) -> str:
        """Why training stops, as the end of a sentence."""
        best = "none was finite" if self.best is None else f"the best was {self.best:.6g}"
        return f"{self.metric} did not improve in {self._patience} validations; {best}"

    def _is_due(self) -> bool:
        return self._best_and_n_since()[1] >= self._patience

    def _best_and_n_since(self) -> tuple[float | None, int]:
        """Returns the best value, and the number of values since then."""
        best, n_since = None, 0
        for value in self._values.values():
            if math.isfinite(value) and (
                best is None or self._sign * (best - value) > self._min_delta
            ):
                best, n_since = value, 0
            else:
                n_since += 1
        return best, n_since


class StopWhen(Stopping):
    """Requests a stop once a metric reaches a value.

    Args:
        condition: Such as "accuracy >= 0.99" or "loss<0.1": a metric, a comparison and a number.
        group: The metric's group.
        stop: As for `EarlyStopping`.
        path: As for `EarlyStopping`.

    Raises:
        ValueError: If the condition has another form, or the file was not written by this class.

    >>> from tekoa import Summary, TrainState
    >>> stage = StopWhen('accuracy >= 0.9', stop=lambda: print('reached'))
    >>> metrics = {'eval': {'accuracy': 0.9}}
    >>> _ = stage(Summary(state=TrainState.of_parts({}), step=5, metrics=metrics))
    reached
    """

    def __init__(
        self,
        condition: str,
        *,
        group: str = "eval",
        stop: Callable[[], object] | None = None,
        path: str | os.PathLike[str] | None = None,
    ):
        metric, self._comparison, self._bound = parse_condition(condition)
        super().__init__(metric, group=group, stop=stop, path=path)

    @property
    def reason(self) -> str:
        """Why training stops, as the end of a sentence."""
        value = next(reversed(self._values.values()), math.nan)
        return f"{self.metric} is {value:.6g}, {self._comparison} {self._bound:.6g}"

    def _is_due(self) -> bool:
        compare = _COMPARISONS[self._comparison]
        return any(compare(value, self._bound) for value in self._values.values())


def parse_condition(condition: str) -> tuple[str, str, float]:
    """Returns the metric, the comparison and the number of a condition.

    Raises:
        ValueError: If it has another form.

    >>> parse_condition('loss<=1e-2')
    ('loss', '<=', 0.01)
    """
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*(\S+)\s*", condition)
    try:
        if match is None:
            raise ValueError
        metric, comparison, number = match.groups()
        bound = float(number)
        if math.isnan(bound):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"A condition is a metric, >=, <=, > or <, and a number, such as 'accuracy>=0.99'; got "
            f"{condition!r}."
        ) from None
    return metric, comparison, bound


def _read_values(path: pathlib.Path) -> dict[int, float]:
    try:
        values = files.read_json(path, max_bytes=_MAX_BYTES)
        return {int(step): float(value) for step, value in values.items()}
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise  # This is no damage.
    except (OSError, AttributeError, TypeError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.DamagedError(
            f"{path}: was not written by EarlyStopping or StopWhen: {reason}. Restore it from a "
            "backup, or remove it to forget the earlier validations."
        ) from None
