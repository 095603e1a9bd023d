"""The record of an evaluator: which commits it has evaluated, and with which results.

A file with one line of JSON per evaluation, in the order in which they were made. Everything
else, such as points in TensorBoard, can be written again from it.

Step numbers repeat. If training returns to an earlier step and makes later steps again, these
are other commits, and the evaluations of the old ones are superseded: as soon as `run.json` has the
new start, or else with its first commit that is evaluated.
"""

import dataclasses
import json
import logging
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import durable
from tekoa.store.commit.identity import CommitId

_log = logging.getLogger("tekoa")
_NEVER = sys.maxsize
_MAX_LINE_BYTES = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of evaluating one commit.

    Attributes:
        step: Completed optimizer steps.
        commit: The commit; its digest is empty if it is unknown.
        metrics: Values by name.
        wall_time: When it was evaluated, in seconds since 1970.
    """

    step: int
    commit: CommitId
    metrics: dict[str, float]
    wall_time: float

    def to_json(self) -> str:
        """Returns the evaluation as one line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_json(cls, line: str) -> "Evaluation":
        """Reads what `to_json` returned; raises `ValueError` for anything else."""
        try:
            fields: dict[str, Any] = json.loads(line)
            metrics = {str(name): float(value) for name, value in fields["metrics"].items()}
            commit = CommitId(**fields["commit"])
            if not all(isinstance(text, str) for text in dataclasses.astuple(commit)):
                raise ValueError(f"the commit is {fields['commit']!r}")
            return cls(
                step=int(fields["step"]),
                commit=commit,
                metrics=metrics,
                wall_time=float(fields["wall_time"]),
            )
        except (AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


class Evaluations:
    """The evaluations recorded in a file, by step.

    Args:
        path: The file; it need not exist, but its directory must.

    Raises:
        errors.DamagedError: If it contains something else than lines of a reasonable length.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._all: list[Evaluation] = []
        self._ends: dict[str, int] = {}
        self._is_complete = True
        for line in _read_lines(path):
            try:
                self._all.append(Evaluation.from_json(line))
            except ValueError as error:
                # The last line of a killed evaluator; its step is evaluated again.
                _log.warning("%s: ignored the line %r: %s", path, line[:60], error)
                self._is_complete = line.endswith("\n")
        self._apply_all()

    @property
    def current(self) -> list[Evaluation]:
        """The evaluations that are not superseded, lowest step first."""
        return [self._current[step] for step in sorted(self._current)]

    def follow(self, starts: Sequence[tuple[str, int]]) -> list[int]:
        """Supersedes what a start of training evaluated after a step to which a later one returned.

        Args:
            starts: The id of each start, oldest first, and the step at which it began.

        Returns:
            The steps whose evaluations changed, lowest first.
        """
        before, self._ends = self._current, {}
        end = _NEVER
        for start, step in reversed(starts):
            self._ends.setdefault(start, end)
            end = min(end, step)
        self._apply_all()
        steps = {*before, *self._current}
        return sorted(n for n in steps if before.get(n) is not self._current.get(n))

    def is_new(self, step: int, commit: CommitId) -> bool:
        """Returns whether a commit is still to be evaluated."""
        last = self._last.get(step)
        return last is None or last.commit.digest not in ("", commit.digest)

    def append(self, *evaluations: Evaluation) -> int | None:
        """Records evaluations durably.

        Returns:
            The first step from which the evaluations shown before are out of date; None if all
            of them are still current, because training has left the history of the new ones.
        """
        data = "".join(evaluation.to_json() for evaluation in evaluations)
        prefix = "" if self._is_complete else "\n"
        self._is_complete = False
        with self._path.open("a") as file:
            file.write(prefix + data)
            file.flush()
            os.fsync(file.fileno())
        self._is_complete = True
        durable.fsync(self._path.parent)
        self._all += evaluations
        changed = [self._apply(evaluation) for evaluation in evaluations]
        return min((step for step in changed if step is not None), default=None)

    def _apply_all(self) -> None:
        self._last: dict[int, Evaluation] = {}
        self._current: dict[int, Evaluation] = {}
        self._steps_of: dict[str, int] = {}
        self._starts: set[str] = set()
        for evaluation in self._all:
            self._apply(evaluation)

    def _apply(self, new: Evaluation) -> int | None:
        """Adds an evaluation; returns the first step whose evaluations changed."""
        step, commit = new.step, new.commit
        if step > self._ends.get(commit.start, _NEVER):
            self._last[step] = new
            return None
        first = step if step in self._current else None
        if commit.start and commit.start not in self._starts:
            # A start continues from its parent: what others evaluated after it is replaced.
            parent_step = self._steps_of.get(commit.parent, step - 1)
            first = min(step, parent_step + 1)
        if first is not None:
            self._current = {n: old for n, old in self._current.items() if n < first}
        self._current[step] = self._last[step] = new
        self._starts.add(commit.start)
        self._steps_of[commit.digest] = step
        return step if first is None else first


def _read_lines(path: pathlib.Path) -> list[str]:
    lines = []
    try:
        with files.open_regular(path) as file:
            # A line of any length would fill the memory.
            while line := file.readline(_MAX_LINE_BYTES):
                lines.append(line.decode(errors="replace"))
                if len(line) == _MAX_LINE_BYTES:
                    raise errors.DamagedError(
                        f"{path}: line {len(lines)} has {len(line)} bytes or more. Restore the "
                        "file from a backup, or remove it to evaluate all checkpoints again."
                    )
    except FileNotFoundError:
        pass
    return lines
