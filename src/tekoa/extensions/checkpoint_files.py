"""Writes checkpoints to files and reads them back."""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tekoa import hosts
from tekoa._aliases import accept_aliases
from tekoa.core import files
from tekoa.core.state import Health, LossScale, TrainState
from tekoa.core.trees import PyTree
from tekoa.extensions import outbox, run_record, serial
from tekoa.loop.checkpoint import PARTS, Checkpoint, Summary, as_summary
from tekoa.loop.task import Restored
from tekoa.store import errors, store
from tekoa.store.commit import paths, retention
from tekoa.store.formats import index
from tekoa.store.read import restore as restore_lib
from tekoa.store.read.restore import LoadedStep

_log = logging.getLogger("tekoa")
# Marks a step whose validation was interrupted.
_OWED = "is_validation_owed"
_FIELDS = {**PARTS, "sums": "sums", "health": "health", "loss_scale": "loss_scale"}


def items_of(state: TrainState) -> dict[str, PyTree]:
    """Returns the parts of a state under the names by which they are stored."""
    items = {item: getattr(state, field) for item, field in _FIELDS.items()}
    return {**items, "step": state.step}


def state_of(items: Mapping[str, PyTree]) -> TrainState:
    """Creates a state from the items that `items_of` returns."""
    fields = {field: items[item] for item, field in _FIELDS.items()}
    fields["health"] = Health(*fields["health"])
    if fields["loss_scale"] is not None:
        fields["loss_scale"] = LossScale(*fields["loss_scale"])
    return TrainState(**fields, step=items["step"])


def save(
    checkpoint_store: store.Store,
    checkpoint: Checkpoint,
    on_commit: Callable[[int], None] | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> None:
    """Starts storing a checkpoint in the background, with `meta` beside its own facts.

    A resumed loop replaces the steps that an earlier start committed after the one it resumed
    from, because they belong to a history that it does not continue. `replace` replaces any
    step of the same number. The step is committed once all points that were written before this
    call, such as those of TensorBoard, are on disk.
    """
    checkpoint_store.save(
        checkpoint.step,
        items_of(checkpoint.state),
        meta={
            **(meta or {}),
            "data_state": checkpoint.data_state,
            "facts": dict(checkpoint.facts),
            "inputs": checkpoint.setup.get("inputs"),
        },
        metrics=as_summary(checkpoint).scalars,
        before_commit=outbox.barrier(),
        on_commit=on_commit,
        exist_ok=True,
        replace=replace,
        parent=checkpoint.resumed_from,
    )


class StoreWriter:
    """A writer that stores checkpoints in the background."""

    def __init__(self, checkpoint_store: store.Store):
        self._store = checkpoint_store

    def poll(self) -> None:
        """Raises if saves failed; cheap enough to be called before every step."""
        self._store.poll()

    @property
    def store(self) -> store.Store:
        """The store that the checkpoints are written to."""
        return self._store

    def wait(self) -> None:
        """Waits until all checkpoints are on disk."""
        self._store.wait()

    def close(self) -> None:
        """Waits until all checkpoints are on disk, and releases the directory."""
        self._store.close()


class CheckpointFileWriter(StoreWriter):
    """Stores checkpoints in the background; a step is stored completely or not at all.

    Args:
        directory: Directory of the steps; this process becomes its only writer. `output_dir=` is
            an alias.
        keep: Number of the newest steps to keep.
        keep_every: If set, multiples of this step are kept as well.
        format: "native", or "t5x" for steps that T5X can read too.
        grace_seconds: How long to wait for a save to end when the program exits or is stopped.
        on_slow_save: What to do if the previous save has not ended: "wait" for it, or "skip" the
            new one. The last checkpoint is never skipped.
        run_file: Whether the first call adds this start of the program to `run.json`: command,
            package versions, git commit and a copy of the script.

    Attributes:
        meta: JSON values to store with every checkpoint.
        settings: JSON values to record in `run.json`, beside the facts of the loop.
    """

    @accept_aliases(output_dir="directory")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 1,
        keep_every: int | None = None,
        format: Literal["native", "t5x"] = "native",
        grace_seconds: float = 60.0,
        on_slow_save: Literal["wait", "skip"] = "wait",
        run_file: bool = True,
    ):
        self.meta: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self._must_record = run_file and hosts.current().is_writer
        rules: list[retention.Rule] = [retention.KeepLast(keep)]
        if keep_every is not None:
            rules.append(retention.KeepEvery(keep_every))
        super().__init__(
            store.Store(
                directory,
                keep=rules,
                format=format,
                grace_seconds=grace_seconds,
                on_slow_save=on_slow_save,
            )
        )

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Starts storing a checkpoint; see `Store.save` about existing steps."""
        self._store.poll()
        if self._must_record:
            self._must_record = False
            _record_start(self._store.directory, checkpoint, self.settings)
        release = outbox.release(self._store.directory)
        save(self._store, checkpoint, lambda step: release(), meta=self.meta)
        return checkpoint


def _record_start(
    directory: pathlib.Path, checkpoint: Checkpoint, settings: Mapping[str, Any]
) -> None:
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        run_record.write_start(
            directory,
            {"settings": {**settings, **checkpoint.facts}},
            step=checkpoint.step - checkpoint.n_completed_steps,
            sources=[] if script is None else [script],
        )
    except (OSError, errors.DamagedError) as error:
        # Training must not end because of it; the checkpoints report their own failures.
        _log.warning("%s: could not write %s: %s", directory, run_record.RUN_FILE, error)


class CheckpointFileReader:
    """Initialises a `TrainLoop` from the newest valid checkpoint of a directory.

    If the directory has no checkpoint, the loop starts from scratch.

    Args:
        directory: Directory of the steps. `input_dir=` and `dir=` are aliases.
        target: The model to initialise from scratch: anything that `TrainLoop` accepts.
        quarantine: Whether to quarantine newer damaged steps, if the directory is writable and
            has no other writer; otherwise nothing is changed there.
    """

    @accept_aliases(input_dir="directory", dir="directory")
    def __init__(self, directory: str | os.PathLike[str], target: Any, *, quarantine: bool = True):
        self._directory = files.local_path(directory)
        self._quarantine = quarantine
        self.target = target

    def restore(self, fresh: TrainState) -> Restored | None:
        """Returns the saved state in the structure of a fresh one, or None if there is none."""
        loaded = load_newest(functools.partial(restore_lib.restore, self._directory), fresh)
        if loaded is None:
            return None
        if loaded.skipped and self._quarantine and os.access(self._directory, os.W_OK):
            with (
                contextlib.suppress(errors.LeaseHeldError),
                store.Store(self._directory, keep=()) as writable,
            ):
                writable.quarantine_damaged([skip.step for skip in loaded.skipped])
        return restored_of(loaded)


def process(
    checkpoint: Checkpoint, stages: Sequence[serial.Stage], writers: Sequence[serial.Stage]
) -> Checkpoint:
    """Runs stages on a checkpoint, and then writers; these even if its validation is interrupted.

    Raises:
        InterruptedError: If a stage raised it. The next start repeats the validation; see `owed`.
    """
    try:
        return serial.serial(*stages, *writers)(checkpoint)
    except InterruptedError:
        facts = {**checkpoint.facts, _OWED: True}
        serial.serial(*writers)(dataclasses.replace(checkpoint, facts=facts))
        raise


def owed(directory: pathlib.Path, checkpoint: Checkpoint) -> Summary | None:
    """Returns the checkpoint at which a run resumes, if its validation was interrupted.

    Args:
        directory: The directory of the steps.
        checkpoint: The checkpoint of the loop; the metrics of its step are read from the file.
    """
    path = paths.step_dir(directory, checkpoint.step)
    if not (path / paths.INDEX).exists():
        return None  # There is no such step, or another program wrote it.
    stored = index.read_index(path)
    if not stored.meta.get("facts", {}).get(_OWED):
        return None
    metrics: dict[str, dict[str, float]] = {}
    for tag, value in stored.metrics.items():
        group, _, name = tag.partition("/")
        metrics.setdefault(group, {})[name] = value
    return dataclasses.replace(as_summary(checkpoint), metrics=metrics)


def load_newest(restore: Callable[..., LoadedStep | None], fresh: TrainState) -> LoadedStep | None:
    """Restores the newest valid step with the structure of a fresh state.

    Args:
        restore: `Store.restore`, or `tekoa.store.restore` of a directory.
        fresh: A new state, or its shapes.
    """
    # Older steps have no sums of the loss, which are zero at every regular checkpoint anyway.
    return restore(items_of(fresh), zeros_if_missing=("sums",))


def restored_of(loaded: LoadedStep) -> Restored:
    """Returns what a loop resumes from: the state and what was saved with it."""
    return Restored(
        state=state_of(loaded.items),
        data_state=loaded.meta.get("data_state"),
        facts=loaded.meta.get("facts", {}),
        commit=loaded.commit.digest,
    )
