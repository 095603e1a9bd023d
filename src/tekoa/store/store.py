"""The writer of a directory of checkpoints.

It holds the lease, saves steps in the background, removes those that no rule keeps, and restores
the newest valid one. It knows only named trees, not training loops.
"""

import itertools
import json
import logging
import operator
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from tekoa import hosts
from tekoa.core import files
from tekoa.core.trees import PyTree
from tekoa.store import errors
from tekoa.store.commit import background, commit, identity, paths, retention, together
from tekoa.store.commit.lease import Lease, acquire
from tekoa.store.formats import leaves, nonfinite
from tekoa.store.formats.index import Index, read_index
from tekoa.store.formats.step import Format, finish_step, is_committed, open_step, write_step
from tekoa.store.read.restore import LoadedStep, restore

_log = logging.getLogger("tekoa.store")
# The processes of a group open their stores in the same order.
_numbers = itertools.count(1)


class Store:
    """Saves and restores the steps of one directory, as its only writer.

    Of several processes that train together, process 0 holds the lease and commits. Several
    threads of one process may save; their saves run one after another.

    Args:
        directory: The directory of steps; created if needed.
        keep: Retention rules; a step is kept if any of them selects it.
        keep_newest: Whether the step with the highest number is kept whatever the rules select.
        format: 'native', or 't5x' for steps that T5X can read too.
        axes: For 't5x': by item, a tree of axes as for `t5x.write`.
        fatal_after: Number of consecutive failed saves that raise an error.
        grace_seconds: How long the program waits for a save to end when it exits or is stopped.
        on_slow_save: What happens to a save while the one before still runs: 'wait' for that
            one, or 'skip' it. The last one that was skipped is saved by `wait` and `close`.

    Attributes:
        directory: The directory of steps, resolved.

    Raises:
        errors.LeaseHeldError: If another process is writing to the directory.
        errors.StoreError: If the directory is not writable.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: Iterable[retention.Rule] = (retention.KeepLast(1),),
        keep_newest: bool = True,
        format: Format = "native",
        axes: Mapping[str, Any] | None = None,
        fatal_after: int = 3,
        grace_seconds: float = 60.0,
        on_slow_save: Literal["wait", "skip"] = "wait",
    ):
        if on_slow_save not in ("wait", "skip"):
            raise ValueError(f"on_slow_save must be 'wait' or 'skip', got {on_slow_save!r}.")
        if format not in ("native", "t5x"):
            raise ValueError(f"format must be 'native' or 't5x', got {format!r}.")
        self._rules, self._keep_newest = tuple(keep), keep_newest
        self._format: Format = format
        self._axes = dict(axes or {})
        self._group = hosts.current()
        self._what = f"store {next(_numbers)}"
        self._lease: Lease | None = None
        together.run_on_writer(self._group, f"{self._what}, open", lambda: self._open(directory))
        self.directory = files.local_path(directory).resolve()
        self._saver = background.BackgroundSaver(
            fatal_after=fatal_after, grace_seconds=grace_seconds
        )
        self._on_slow_save = on_slow_save
        self._nonfinite = nonfinite.Watch()
        self._metrics: dict[int, dict[str, float]] = {}
        self._saved: set[int] = set()
        self._parent = ""
        self._is_open = True

    def _open(self, directory: str | os.PathLike[str]) -> None:
        self._lease = acquire(directory)

    def save(
        self,
        step: int,
        items: Mapping[str, PyTree],
        *,
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        before_commit: Callable[[], None] | None = None,
        on_commit: Callable[[int], None] | None = None,
        exist_ok: bool = False,
        replace: bool = False,
        parent: str = "",
    ) -> None:
        """Starts saving a step in the background; see `on_slow_save` if another save runs.

        Arrays of parameters, optimizer state or averages that contain NaN or Inf are saved, and a
        warning names them.

        A step that this store has saved or restored is not saved again, unless `replace` is set.

        Args:
            step: Completed optimizer steps.
            items: Trees by item name. jax arrays must stay valid (not donated) until the save
                has ended; numpy arrays are copied.
            meta: JSON values stored in the same commit.
            metrics: Numbers that `KeepBest` compares.
            before_commit: Called in the background, on process 0, before the step is committed;
                to wait until what belongs to the step is on disk elsewhere.
            on_commit: Called in the background with the step once it is committed.
            exist_ok: Whether a valid step that is already there counts as saved; if not, the save
                fails. After a resume, steps of other starts are replaced, because they belong to
                a history that was not continued.
            replace: Replace a valid step that is already there, whoever saved it.
            parent: The digest of the commit that training resumed from; not needed if this
                store restored it.

        Raises:
            errors.SaveFailedError: As for `poll`, for an earlier save.
            errors.StoreError: If the store is closed.
            TypeError: If `meta` is not JSON.
            ValueError: If the step is negative.
        """
        if not self._is_open:
            raise errors.StoreError(f"{self.directory}: the store is closed. Open a new one.")
        step = operator.index(step)
        paths.step_dir(self.directory, step)  # Raises for a negative step.
        snapshot = leaves.snapshot(items)
        json_meta = json.loads(json.dumps(dict(meta or {}), default=_plain_number))
        scores = {name: float(value) for name, value in (metrics or {}).items()}

        def job() -> None:
            if step in self._saved and not replace:
                _log.info("step %d is already saved", step)
                return
            started = time.monotonic()
            origin = parent or self._parent
            choice = self._choose(step, origin, replace=replace) if exist_ok or replace else "new"
            if choice == "keep":
                return
            if choice == "saved":
                _log.info("step %d was already saved", step)
            else:
                self._write(
                    step,
                    snapshot(),
                    json_meta,
                    scores,
                    {**identity.start_facts(origin), **identity.chain_facts(self.directory, step)},
                    before_commit=before_commit,
                    replace=choice == "replace",
                )
                _log.info("saved step %d in %.3f s", step, time.monotonic() - started)
            self._saved.add(step)
            if on_commit is not None:
                on_commit(step)
            if self._lease is not None:
                self._retain(self._lease, step)

        what = f"{self.directory}: saving step {step}"
        if self._on_slow_save == "skip" and self._is_writer_busy(step):
            self._saver.postpone(what, job)
        else:
            self._saver.start(what, job)

    def _is_writer_busy(self, step: int) -> bool:
        what = f"{self._what}, is busy at {step}"
        return together.run_on_writer(self._group, what, lambda: self._saver.is_busy)

    @property
    def n_late_saves(self) -> int:
        """Number of saves so far that waited for the one before, or were skipped."""
        return self._saver.n_late

    def _choose(self, step: int, origin: str, *, replace: bool) -> str:
        """Returns what to do about a step that may exist: 'new', 'replace', 'saved' or 'keep'.

        Quarantines a damaged one.
        """
        path = paths.step_dir(self.directory, step)

        def choose() -> str:
            try:
                if not path.is_dir():
                    return "new"
                digest = open_step(path).commit.digest
            except errors.DamagedError as error:
                self._quarantine(step, str(error))
                return "new"
            if digest == origin and not replace:
                return "saved"
            if replace or origin:
                return "replace"
            _log.warning(
                "%s: was saved by an earlier run that this one does not continue. It is kept, and "
                "the new step %d is not saved. Use another directory.",
                path,
                step,
            )
            return "keep"

        return together.run_on_writer(self._group, f"{self._what}, look for {step}", choose)

    def _quarantine(self, step: int, reason: str) -> None:
        if self._lease is not None:
            path = commit.quarantine(self._lease, step)
            _log.warning("quarantined step %d as %s: %s", step, path.name, reason)

    def _write(
        self,
        step: int,
        items: dict[str, PyTree],
        meta: dict[str, Any],
        metrics: dict[str, float],
        facts: dict[str, Any],
        *,
        before_commit: Callable[[], None] | None,
        replace: bool,
    ) -> None:
        pairs = [leaves.describe(name, leaf) for name, leaf in leaves.flatten(items).items()]
        stored = [pair for pair in pairs if pair is not None]
        values = {leaf.name: value for leaf, value in stored}
        for line in self._nonfinite.look(values):
            _log.warning("step %d: %s", step, line)
        index = Index(
            step=step,
            leaves={leaf.name: leaf for leaf, _ in stored},
            items=list(items),
            meta=meta,
            metrics=metrics,
            nodes=leaves.node_classes(items),
        )

        def finish(tmp: pathlib.Path) -> None:
            finish_step(tmp, index, format=self._format)
            if before_commit is not None:
                before_commit()

        commit.commit(
            self._lease,
            step,
            lambda tmp: write_step(tmp, index, values, format=self._format, axes=self._axes),
            finish=finish,
            format=self._format,
            facts=facts,
            replace=replace,
            group=self._group,
            what=f"{self._what}, save of step {step}",
        )
        self._metrics[step] = metrics

    def prune(self) -> None:
        """Removes the steps that no rule keeps; so does every save, once it is committed."""
        self._saver.wait()
        if self._lease is not None:
            self._retain(self._lease, None)

    def _retain(self, lease: Lease, committed: int | None) -> None:
        # Only committed steps count, and only they can be removed.
        self._metrics = {
            n: self._read_metrics(n)
            for n in self.steps()
            if n in self._metrics or is_committed(paths.step_dir(self.directory, n))
        }
        unwanted = retention.to_remove(
            self._rules,
            self._metrics,
            self.directory,
            committed=committed,
            keep_newest=self._keep_newest,
        )
        for n in unwanted:
            try:
                if not is_committed(paths.step_dir(self.directory, n)):
                    continue  # Replaced by another program in the meantime.
                commit.remove(lease, n)
                _log.info("removed step %d: no rule keeps it", n)
            except OSError as error:
                # The save itself succeeded: too many steps are better than a failure.
                _log.warning("could not remove step %d: %s", n, error)

    def _read_metrics(self, step: int) -> dict[str, float]:
        if step in self._metrics:
            return self._metrics[step]
        try:
            return read_index(paths.step_dir(self.directory, step)).metrics
        except (errors.DamagedError, PermissionError):
            return {}  # Written by another program, or damaged.

    def restore(self, targets: Mapping[str, PyTree], **options: Any) -> LoadedStep | None:
        """Restores the newest valid step and quarantines newer damaged ones.

        Arguments, result and errors are those of `tekoa.store.restore`, without `step`.
        """
        restored = restore(self.directory, targets, **options)
        if restored is None:
            return None
        for skip in restored.skipped:
            self._quarantine(skip.step, skip.reason)
        self._saved.add(restored.step)
        self._parent = restored.commit.digest
        _log.info("restored step %d of %s", restored.step, self.directory)
        return restored

    def quarantine_damaged(self, steps: Iterable[int]) -> None:
        """Quarantines those of the steps that are damaged; they no longer count."""

        def check() -> None:
            for step in steps:
                path = paths.step_dir(self.directory, step)
                try:
                    if path.is_dir():
                        open_step(path)
                except errors.DamagedError as error:
                    self._quarantine(step, str(error))

        together.run_on_writer(self._group, f"{self._what}, quarantine", check)

    def set_aside(self, steps: Sequence[int]) -> pathlib.Path:
        """Moves steps, at least one, to a subdirectory, where they do not count; returns it."""

        def move() -> str:
            assert self._lease is not None
            return str(commit.set_aside(self._lease, steps))

        return pathlib.Path(together.run_on_writer(self._group, f"{self._what}, set aside", move))

    def steps(self) -> list[int]:
        """Lists the committed steps, lowest first."""
        return paths.list_steps(self.directory)

    def poll(self) -> None:
        """Raises if saves failed; call it every step, since it costs almost nothing.

        A failed save is logged as soon as it fails.

        Raises:
            errors.SaveFailedError: After `fatal_after` failures in a row.
            errors.FencedError: If another process took over the directory.
        """
        self._saver.poll()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the running save and reports failures as `poll` does.

        Returns:
            Whether it ended in time.
        """
        return self._saver.wait(timeout_seconds)

    def close(self, grace_seconds: float | None = None) -> None:
        """Waits for the running save and releases the lease; may be called twice.

        Raises:
            errors.SaveFailedError: If the last save failed or does not end in time.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._saver.close(grace_seconds)
        finally:
            # A save that is still running needs the lease.
            if self._lease is not None and not self._saver.is_busy:
                self._lease.release()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except errors.StoreError as error:
            if kind is None:
                raise
            # The error of the `with` block is the one to raise.
            _log.error("%s", error)


def _plain_number(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"meta contains a {type(value).__name__}, which JSON cannot store. Put arrays in `items`."
    )
