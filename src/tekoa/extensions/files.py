"""Checkpoints to files and back: the store's trees made of a loop's record."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tekoa.core.state import Health, TrainState
from tekoa.core.trees import PyTree
from tekoa.loop.checkpoint import Checkpoint, as_summary
from tekoa.loop.task import Restored
from tekoa.store import errors, restoring, retention, store

_FIELDS = {
    "model_params": "params",
    "model_state": "variables",
    "optimizer_state": "opt_state",
    "average": "average",
    "carry": "carry",
    "rng": "rng",
    "sums": "sums",
    "health": "health",
}


def items_of(state: TrainState) -> dict[str, PyTree]:
    """Names the parts of a state as they are stored."""
    items = {item: getattr(state, field) for item, field in _FIELDS.items()}
    return {**items, "step": state.step}


def state_of(items: Mapping[str, PyTree]) -> TrainState:
    """Makes a state of what `items_of` named."""
    fields = {field: items[item] for item, field in _FIELDS.items()}
    fields["health"] = Health(*fields["health"])
    return TrainState(**fields, step=items["step"])


def meta_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is stored beside the arrays, in the same commit."""
    return {"data_state": checkpoint.data_state, "facts": dict(checkpoint.facts)}


def save(
    opened: store.Store,
    checkpoint: Checkpoint,
    on_commit: Callable[[int], None] | None = None,
) -> None:
    """Starts to store a checkpoint.

    A step that is there already is left alone: a run killed after its commit comes here again.
    """
    opened.save(
        checkpoint.step,
        items_of(checkpoint.state),
        meta=meta_of(checkpoint),
        metrics=flat_metrics(checkpoint),
        on_commit=on_commit,
        exist_ok=True,
    )


class CheckpointFileWriter:
    """Stores each checkpoint in the background; a step is there whole, or not at all.

    Args:
        output_dir: Directory of the steps; this process becomes its only writer.
        keep: How many of the newest steps to keep.
        keep_every: Steps at multiples of this are kept too.
        layout: "t5x" writes what T5X can read.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        keep: int = 1,
        keep_every: int | None = None,
        layout: Literal["tekoa", "t5x"] = "tekoa",
    ):
        rules: list[retention.Rule] = [retention.KeepLast(keep)]
        if keep_every is not None:
            rules.append(retention.KeepEvery(keep_every))
        self._store = store.Store(output_dir, keep=rules, layout=layout)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Starts to store one checkpoint; a step that is there already is left alone."""
        self._store.poll()
        save(self._store, checkpoint)
        return checkpoint

    def wait(self) -> None:
        """Waits until what was given is on disk."""
        self._store.wait()

    def close(self) -> None:
        """Waits until what was given is on disk, and lets other writers in."""
        self._store.close()


def flat_metrics(checkpoint: Checkpoint) -> dict[str, float]:
    """Joins groups and names of metrics: 'eval/loss'."""
    metrics = as_summary(checkpoint).metrics
    return {
        f"{group}/{name}": float(value)
        for group, values in metrics.items()
        for name, value in values.items()
    }


class CheckpointFileReader:
    """Initialises a `TrainLoop` from the newest good checkpoint of a directory.

    Where the directory has no checkpoint the loop starts from scratch.

    Args:
        input_dir: Directory of the steps.
        target: What initialises from scratch: all that `TrainLoop` takes as `init`.
        put_aside: If true, damaged newer steps are put aside where the directory is free to
            be written; else nothing is changed there.
    """

    def __init__(self, input_dir: str | os.PathLike[str], target: Any, *, put_aside: bool = True):
        self._directory = pathlib.Path(input_dir)
        self._put_aside = put_aside
        self.target = target

    def restore(self, fresh: TrainState) -> Restored | None:
        """Gives the saved state in the form of a fresh one, or None if there is none."""
        found = restoring.restore(self._directory, items_of(fresh))
        if found is None:
            return None
        if found.skipped and self._put_aside and os.access(self._directory, os.W_OK):
            with (
                contextlib.suppress(errors.LeaseHeldError),
                store.Store(self._directory, keep=()) as opened,
            ):
                found = opened.restore(items_of(fresh)) or found
        return Restored(
            state=state_of(found.items),
            data_state=found.meta.get("data_state"),
            facts=found.meta.get("facts", {}),
        )
