"""Checkpoints as plain nested dicts of numpy arrays, without a model's classes."""

import os
import pathlib
from collections.abc import Collection
from typing import Any

from tekoa.store import arrays, errors, manifest, names, steps, walkback


def load(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    items: Collection[str] | None = None,
    verify: manifest.Verify = "full",
) -> dict[str, Any]:
    """Reads a checkpoint of any supported format.

    Args:
        path: A directory of steps, the directory of one step, or a T5X msgpack file.
        step: This step of a directory of steps; None takes the newest good one.
        items: Read only these items, such as ['model_params']; None reads all.
        verify: How much of a step to check before using it.

    Returns:
        Nested dicts of numpy arrays by item (`model_params`, `model_state`,
        `optimizer_state`, `average` ...), plus `step` (an int) and `meta` (a dict).
        Members of lists and tuples are under '0', '1' ...; a PRNG key is its data.

    Raises:
        errors.StoreError: If there is no checkpoint, or none that is usable.
    """
    return load_step(open_newest(path, step=step, verify=verify), items=items)


def open_newest(
    path: str | os.PathLike[str], *, step: int | None = None, verify: manifest.Verify = "full"
) -> steps.OpenStep:
    """Opens the step that `load` would read."""
    path = pathlib.Path(path)
    if path.is_file() and path.name == names.T5X:
        path = path.parent
    if steps.is_step(path):
        if step is not None and step != names.parse_step(path.name):
            raise errors.StoreError(f"{path} is one step; step {step} was asked for.")
        return steps.open_step(path, verify=verify)
    if step is not None:
        return steps.open_step(steps.find(path, step), verify=verify)
    found = walkback.newest_usable(path, lambda each: steps.open_step(each, verify=verify))
    if found is None:
        raise errors.StoreError(
            f"{path}: no checkpoint is there. Give a directory that holds 'checkpoint_<step>' "
            "directories, or one of those."
        )
    return found.value


def load_step(source: steps.OpenStep, *, items: Collection[str] | None = None) -> dict[str, Any]:
    """Reads the items of one opened step; see `load`."""
    index = source.index
    kept = index.items if items is None else [item for item in index.items if item in items]
    wanted = {name: leaf for name, leaf in index.leaves.items() if name[0] in kept}
    tree: dict[str, Any] = {item: {} for item in kept}
    tree.update(arrays.nest(source.read(wanted, {})))
    return {**tree, "step": index.step, "meta": index.meta}
