"""Copies of the steps with the best value of a metric, each with its score.

The scores are in `scores.json`, by the identity of the commit that they belong to. A score is
written before its step is copied, and counts only while that very commit is there: whenever the
program is killed, scores and steps belong together. The file `score` holds the best value as text.

The best step always has the highest number, so that whoever reads the newest step of the directory
reads the best one.
"""

import json
import math
import operator
import os
import pathlib
from collections.abc import Sequence

from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import commit, durable, identity, paths, retention, score
from tekoa.store.commit.lease import Lease, held
from tekoa.store.formats.step import is_committed
from tekoa.store.transfer import copy

SCORES = "scores.json"


class BestCopies:
    """A directory with copies of the best steps. One process writes to it.

    Args:
        directory: The directory; it need not exist.
        mode: Whether lower ('min') or higher ('max') values are better.
        keep: How many copies to keep.

    Raises:
        errors.DamagedError: If the scores cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str], *, mode: score.Mode, keep: int):
        self._directory, self._keep = files.local_path(directory), keep
        if self._directory.is_symlink():
            raise errors.UnsafeError(f"{self._directory}: is a link; links are not followed.")
        self._is_better = operator.lt if mode == "min" else operator.gt
        self._sign = 1 if mode == "min" else -1
        self._scores = self._read()

    @property
    def scores(self) -> dict[int, float]:
        """The scores of the copies, by step; without copies that have no score."""
        return {step: value for step, (_, value) in self._scores.items()}

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        values = [value for _, value in self._scores.values()]
        return min(values, key=lambda value: self._sign * value, default=None)

    def repair(self) -> None:
        """Completes a change that a killed program left unfinished."""
        if self._directory.is_dir():
            with held(self._directory) as lease:
                self._settle(lease)

    def offer(self, path: str | os.PathLike[str], value: float) -> bool:
        """Copies a step if its value is finite and the best so far.

        Args:
            path: The directory of the step.
            value: Its value of the metric.

        Returns:
            Whether it was copied.

        Raises:
            errors.DamagedError: If the step is incomplete.
            errors.LeaseHeldError: If another process is writing to the directory.
        """
        # Copies are set aside when training is rewound, also while this program runs.
        self._scores = self._read()
        value, best = float(value), self.best
        if not math.isfinite(value) or not (best is None or self._is_better(value, best)):
            return False
        step = paths.parse_step(pathlib.Path(path).name)
        if step is None:
            raise ValueError(f"{path} is not a step: its name must be 'checkpoint_<step>'.")
        digest = identity.commit_id(path).digest
        with held(self._directory) as lease:
            entries = [(n, *entry) for n, entry in self._scores.items()]
            self._write([*entries, (step, digest, value)])
            copy.copy_step(path, self._directory)
            self._scores[step] = (digest, value)
            self._settle(lease)
        return True

    def _settle(self, lease: Lease) -> None:
        """Removes all copies but the best, and the scores of those that are gone."""
        ranked = sorted(self._scores, key=lambda n: (self._sign * self._scores[n][1], -n))
        steps = paths.list_steps(self._directory)
        committed = [n for n in steps if is_committed(paths.step_dir(self._directory, n))]
        # Copies without a score are older than all scores.
        ranked += [n for n in reversed(committed) if n not in self._scores]
        top = ranked[0] if ranked else None
        best_steps = [n for n in ranked if n == top or n < (top or 0)][: self._keep]
        for n in committed:
            is_pinned = (paths.step_dir(self._directory, n) / retention.PINNED).exists()
            if n not in best_steps and not is_pinned:
                commit.remove(lease, n)
        self._scores = {n: entry for n, entry in self._scores.items() if n in best_steps}
        self._write([(n, *entry) for n, entry in self._scores.items()])
        if self.best is None:
            (self._directory / score.NAME).unlink(missing_ok=True)
        else:
            durable.replace(self._directory / score.NAME, repr(self.best).encode())

    def set_aside(self, steps: Sequence[int]) -> pathlib.Path:
        """Moves copies, at least one, to a subdirectory, where they do not count; returns it."""
        with held(self._directory) as lease:
            aside = commit.set_aside(lease, steps)
            self._scores = {n: entry for n, entry in self._scores.items() if n not in steps}
            self._settle(lease)
        return aside

    def _write(self, entries: list[tuple[int, str, float]]) -> None:
        rows = [{"step": n, "commit": digest, "value": value} for n, digest, value in entries]
        durable.replace(self._directory / SCORES, json.dumps(rows, indent=1).encode())

    def _read(self) -> dict[int, tuple[str, float]]:
        """Returns digest and score of each copy that has a score."""
        digests = {}
        for step in paths.list_steps(self._directory):
            path = paths.step_dir(self._directory, step)
            if is_committed(path):
                digests[step] = identity.commit_id(path).digest
        try:
            rows = json.loads(files.read_bytes(self._directory / SCORES, max_bytes=2**24))
            entries = [(int(row["step"]), str(row["commit"]), float(row["value"])) for row in rows]
        except FileNotFoundError:
            return self._read_text(digests)
        except PermissionError:
            raise  # This is no damage.
        except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError, OSError) as error:
            raise errors.DamagedError(
                f"{self._directory / SCORES}: cannot be read ({error}). Delete it to start from "
                "scratch; the copies stay until there is a better one."
            ) from None
        return {n: (d, value) for n, d, value in entries if digests.get(n) == d}

    def _read_text(self, digests: dict[int, str]) -> dict[int, tuple[str, float]]:
        """Reads the score of an earlier version, which belongs to the newest copy."""
        value = score.read(self._directory / score.NAME)
        if value is None or not digests:
            return {}
        newest = max(digests)
        return {newest: (digests[newest], value)}
