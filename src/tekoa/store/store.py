"""The writer of a directory of checkpoints.

Holds the lease, saves steps in the background, removes those that no rule keeps, and
restores the newest good one. It knows trees by name and nothing of loops.
"""

import itertools
import json
import logging
import operator
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tekoa.core import hosts
from tekoa.core.trees import PyTree
from tekoa.store import (
    background,
    commit,
    errors,
    leaves,
    manifest,
    names,
    restoring,
    retention,
    steps,
    together,
)
from tekoa.store import lease as lease_lib

_log = logging.getLogger("tekoa.store")
# The processes of a group open their stores in the same order.
_numbers = itertools.count(1)


class Store:
    """Saves and restores the steps of one directory, as its only writer.

    Args:
        directory: Made if it does not exist.
        keep: Rules of `retention`; a step is kept if any of them wants it.
        layout: 'tekoa', or 't5x' for steps that T5X can read too.
        axes: For 't5x': by item, a tree of axes as `t5x.write` takes it.
        fatal_after: Saves that must fail in a row before an error is raised.
        grace_seconds: How long the end of the program waits for a save.

    Raises:
        errors.LeaseHeldError: If another process writes there. Of processes that train
            together process 0 holds the lease and commits.
        errors.StoreError: If the directory cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: Iterable[retention.Rule] = (retention.KeepLast(1),),
        layout: steps.Layout = "tekoa",
        axes: Mapping[str, Any] | None = None,
        fatal_after: int = 3,
        grace_seconds: float = 60.0,
    ):
        if layout not in ("tekoa", "t5x"):
            raise ValueError(f"layout must be 'tekoa' or 't5x', got {layout!r}.")
        self._rules = tuple(keep)
        self._layout: steps.Layout = layout
        self._axes = dict(axes or {})
        self._group = hosts.current()
        self._what = f"store {next(_numbers)}"
        self._lease: lease_lib.Lease | None = None
        together.run_on_writer(self._group, f"{self._what}, open", lambda: self._open(directory))
        self.directory = pathlib.Path(directory).resolve()
        self._runner = background.Runner(fatal_after=fatal_after, grace_seconds=grace_seconds)
        self._metrics: dict[int, dict[str, float]] = {}
        self._mine: set[int] = set()
        self._is_open = True

    def _open(self, directory: str | os.PathLike[str]) -> None:
        self._lease, is_first = lease_lib.acquire(directory)
        if is_first:
            commit.sweep(self._lease)

    def save(
        self,
        step: int,
        items: Mapping[str, PyTree],
        *,
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        on_commit: Callable[[int], None] | None = None,
        exist_ok: bool = False,
    ) -> None:
        """Starts to save a step and returns; waits for an earlier save still running.

        A step that this store has saved or restored is not saved again.

        Args:
            step: Completed optimizer steps.
            items: Trees by item name. Arrays of jax must stay valid (not donated)
                until the save has ended; numpy arrays are copied here.
            meta: JSON values stored in the same commit.
            metrics: Numbers that `retention.KeepBest` compares.
            on_commit: Called in the background with the step once it is committed.
            exist_ok: Take a step that an earlier run committed for saved, after
                checking it; it is never overwritten, and otherwise a failure.

        Raises:
            errors.SaveFailedError: As `poll`, for an earlier save.
            errors.StoreError: If the store is closed.
            TypeError: If `meta` is not JSON.
            ValueError: If the step is negative.
        """
        if not self._is_open:
            raise errors.StoreError(f"{self.directory}: the store is closed. Open a new one.")
        step = operator.index(step)
        names.step_dir(self.directory, step)  # Refuses a number that names no step.
        snapshot = leaves.snapshot(items)
        body = json.loads(json.dumps(dict(meta or {}), default=_plain_number))
        scores = {name: float(value) for name, value in (metrics or {}).items()}

        def job() -> None:
            if step in self._mine:
                _log.info("step %d is already saved", step)
                return
            started = time.monotonic()
            if exist_ok and self._is_there(step):
                _log.info("step %d was already saved by an earlier run", step)
            else:
                self._write(step, snapshot(), body, scores)
                _log.info("saved step %d in %.3f s", step, time.monotonic() - started)
            self._mine.add(step)
            if on_commit is not None:
                on_commit(step)
            if self._lease is not None:
                self._retain(self._lease)

        self._runner.start(f"{self.directory}: saving step {step}", job)

    def _is_there(self, step: int) -> bool:
        """Whether an earlier run saved the step; a damaged one is put aside."""
        path = names.step_dir(self.directory, step)

        def is_whole() -> bool:
            try:
                return path.is_dir() and steps.open_step(path) is not None
            except errors.DamagedError as error:
                self._put_aside(step, str(error))
                return False

        return together.run_on_writer(self._group, f"{self._what}, look for {step}", is_whole)

    def _put_aside(self, step: int, reason: str) -> None:
        if self._lease is not None:
            where = commit.quarantine(self._lease, step)
            _log.warning("put step %d aside as %s: %s", step, where.name, reason)

    def _write(
        self,
        step: int,
        items: dict[str, PyTree],
        meta: dict[str, Any],
        metrics: dict[str, float],
    ) -> None:
        described = [leaves.describe(name, leaf) for name, leaf in leaves.flatten(items).items()]
        kept = [pair for pair in described if pair is not None]
        index = leaves.Index(
            step=step,
            leaves={leaf.name: leaf for leaf, _ in kept},
            items=list(items),
            meta=meta,
            metrics=metrics,
            nodes=leaves.node_classes(items),
        )

        def write(directory: pathlib.Path) -> None:
            values = {leaf.name: value for leaf, value in kept}
            steps.write_step(directory, index, values, layout=self._layout, axes=self._axes)

        together.save(
            self._group,
            self._lease,
            f"{self._what}, save of step {step}",
            step=step,
            write=write,
            finish=lambda tmp: steps.finish_step(tmp, index, layout=self._layout),
            layout=self._layout,
            facts={"meta_hash": commit.meta_hash(meta)},
        )
        self._metrics[step] = metrics

    def _retain(self, lease: lease_lib.Lease) -> None:
        self._metrics = {n: self._metrics_of(n) for n in self.steps()}
        for n in retention.to_remove(self._rules, self._metrics, self.directory):
            try:
                commit.remove(lease, n)
                _log.info("removed step %d: no rule keeps it", n)
            except OSError as error:
                # The save itself is on disk: too many steps are better than a failure.
                _log.warning("could not remove step %d: %s", n, error)

    def _metrics_of(self, step: int) -> dict[str, float]:
        if step not in self._metrics:
            try:
                index = leaves.read_index(names.step_dir(self.directory, step))
            except errors.DamagedError:
                return {}  # Another program's step, or a damaged one: it has no metrics.
            self._metrics[step] = index.metrics
        return self._metrics[step]

    def restore(
        self,
        targets: Mapping[str, PyTree],
        *,
        verify: manifest.Verify = "full",
        cast: bool = False,
    ) -> restoring.Restored | None:
        """Restores the newest good step and puts damaged newer ones aside.

        Takes and gives what `restoring.restore` does.
        """
        restored = restoring.restore(self.directory, targets, verify=verify, cast=cast)
        if restored is None:
            return None
        for skip in restored.skipped:
            self._put_aside(skip.step, skip.reason)
        self._mine.add(restored.step)
        _log.info("restored step %d of %s", restored.step, self.directory)
        return restored

    def steps(self) -> list[int]:
        """Lists the committed steps, lowest first."""
        return names.list_steps(self.directory)

    def poll(self) -> None:
        """Reports a failed save; to be called every step, since it costs next to nothing.

        Raises:
            errors.SaveFailedError: After `fatal_after` failures in a row.
            errors.FencedError: If another process took the directory over.
        """
        self._runner.poll()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the save that runs, and reports as `poll` does.

        Returns:
            Whether it ended in time.
        """
        return self._runner.wait(timeout_seconds)

    def close(self, grace_seconds: float | None = None) -> None:
        """Waits for the save that runs and gives the lease back; may be called again.

        Raises:
            errors.SaveFailedError: If the last save failed or does not end in time.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._runner.close(grace_seconds)
        finally:
            if self._lease is not None:
                self._lease.release()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except errors.StoreError as error:
            if kind is None:
                raise
            # The body's own error is the one to be seen.
            _log.error("%s", error)


def _plain_number(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"meta holds a {type(value).__name__}, which JSON cannot hold. Put arrays into `items`."
    )
