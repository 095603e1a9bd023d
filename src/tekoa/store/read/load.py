"""Checkpoints as plain nested dicts of numpy arrays, without a model's classes."""

import os
from collections.abc import Collection
from typing import Any

from tekoa.core import trees
from tekoa.store import errors
from tekoa.store.commit import manifest, paths
from tekoa.store.formats.step import OpenStep, find, is_step, open_step
from tekoa.store.mirror import mirror
from tekoa.store.read import newest


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    items: Collection[str] | None = None,
    verify: manifest.Verify = "full",
) -> dict[str, Any]:
    """Reads a checkpoint of any supported format.

    Args:
        path: A directory of steps, the directory of one step, or a T5X msgpack file. A directory
            may be a URL in an object store.
        step: The step to read from a directory of steps; by default the newest valid one.
        items: The items to read, such as ['model_params']; by default all.
        verify: How thoroughly to check a step before using it.

    Returns:
        Nested dicts of numpy arrays by item (`model_params`, `model_state`,
        `optimizer_state`, `average` ...), plus `step` (an int) and `meta` (a dict).
        Elements of lists and tuples have the keys '0', '1' ...; a PRNG key is its data.

    Raises:
        errors.StoreError: If there is no checkpoint, or no usable one.
    """
    return load_step(open_newest(path, step=step, verify=verify), items=items)


load = load_checkpoint


def open_newest(
    path: str | os.PathLike[str], *, step: int | None = None, verify: manifest.Verify = "full"
) -> OpenStep:
    """Opens the step that `load_checkpoint` would read; same arguments."""
    if mirror.is_url(path) and step is not None:
        mirror.fetched(f"{os.fspath(path).rstrip('/')}/checkpoint_{step}")
    path = mirror.fetched(path, steps="newest" if step is None else "none")
    if path.is_file() and path.name == paths.T5X:
        path = path.parent
    if is_step(path):
        if step is not None and step != paths.parse_step(path.name):
            raise errors.StoreError(f"{path} is a single step, but step {step} was requested.")
        return open_step(path, verify=verify)
    if step is not None:
        return open_step(find(path, step), verify=verify)
    valid = newest.newest_valid(path, lambda step_dir: open_step(step_dir, verify=verify))
    if valid is None:
        raise errors.StoreError(
            f"{path}: contains no checkpoint. Use a directory with 'checkpoint_<step>' "
            "directories, or one of those."
        )
    return valid.value


def load_step(source: OpenStep, *, items: Collection[str] | None = None) -> dict[str, Any]:
    """Reads the items of an opened step; see `load_checkpoint`."""
    index = source.index
    names = index.items if items is None else [item for item in index.items if item in items]
    leaves = {name: leaf for name, leaf in index.leaves.items() if name[0] in names}
    tree: dict[str, Any] = {item: {} for item in names}
    tree.update(trees.nest(source.read(leaves, {})))
    return {**tree, "step": index.step, "meta": index.meta}
