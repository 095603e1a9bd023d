"""One step, read or written, whatever its format."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax

from tekoa.core import hosts, trees
from tekoa.store import array_writes, arrays, errors, files, leaves, manifest, names, t5x, t5x_step

Layout = Literal["tekoa", "t5x"]


class OpenStep(Protocol):
    """A step whose index is read and whose arrays can be read."""

    @property
    def index(self) -> leaves.Index:
        """What it holds, under the item names of Tekoa."""
        ...

    def read(
        self,
        wanted: Mapping[trees.Name, leaves.Leaf],
        shardings: Mapping[trees.Name, jax.sharding.Sharding],
    ) -> dict[trees.Name, Any]:
        """Reads leaves as numpy arrays, or as jax arrays where a sharding is given."""
        ...


@dataclasses.dataclass(frozen=True)
class TekoaStep:
    """A step in Tekoa's own layout."""

    path: pathlib.Path
    index: leaves.Index

    def read(
        self,
        wanted: Mapping[trees.Name, leaves.Leaf],
        shardings: Mapping[trees.Name, jax.sharding.Sharding],
    ) -> dict[trees.Name, Any]:
        """Reads leaves as numpy arrays, or as jax arrays where a sharding is given."""
        return arrays.read(self.path, wanted, shardings)


def open_step(
    path: str | os.PathLike[str],
    *,
    verify: manifest.Verify = "full",
    part: tuple[int, int] = (0, 1),
) -> OpenStep:
    """Opens one step, after checking its files against its manifest.

    Args:
        path: The directory of the step.
        verify: How much of it to check first.
        part: (index, count): check only each count-th file, from number `index` on.

    Raises:
        errors.DamagedError: If it is not whole, or not a checkpoint at all.
    """
    path = pathlib.Path(path)
    for name, _ in files.walk(path):
        if (path / name).is_symlink():
            raise errors.UnsafeError(f"{path / name}: is a link; links are not followed.")
    layout = "t5x"
    try:
        sealed = manifest.read(path)
        checked = dict(list(sealed.files.items())[part[0] :: part[1]])
        manifest.check(path, dataclasses.replace(sealed, files=checked), verify)
        layout = sealed.layout
        if names.parse_step(path.name) not in (None, sealed.step):
            raise errors.DamagedError(f"{path}: holds step {sealed.step}; it was renamed.")
    except FileNotFoundError:
        # Other programs write T5X steps without a manifest; nothing else may lack it.
        if not t5x.is_t5x(path) or (path / names.INDEX).exists():
            raise errors.DamagedError(
                f"{path}: has no manifest, so Tekoa did not commit it, and is not in T5X's format."
            ) from None
    if layout == "t5x":
        return t5x_step.open_step(path)
    if layout == "tekoa":
        return TekoaStep(path, leaves.read_index(path))
    raise errors.DamagedError(f"{path}: has the unknown layout {layout!r}. Update Tekoa.")


def find(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Gives the directory of a step that must be there.

    Raises:
        errors.StoreError: If it is not, naming the steps that are.
    """
    path = names.step_dir(directory, step)
    if not path.is_dir():
        raise errors.StoreError(
            f"{directory}: has no step {step}. Steps there: {names.list_steps(directory)}."
        )
    return path


def is_step(path: pathlib.Path) -> bool:
    """Tells whether `path` is one step rather than a directory of steps."""
    return (path / names.MANIFEST).exists() or t5x.is_t5x(path)


def write_step(
    directory: pathlib.Path,
    index: leaves.Index,
    values: Mapping[trees.Name, Any],
    *,
    layout: Layout,
    axes: Mapping[str, Any],
) -> None:
    """Writes this process's files of a step into the directory of a commit.

    `finish_step` must follow, on one process, when all have written.

    Args:
        directory: The temporary directory.
        index: What the step holds.
        values: Arrays by name.
        layout: The format.
        axes: For 't5x': by item, a tree of axes as `t5x.write` takes it.
    """
    if layout == "tekoa":
        array_writes.write(directory, values)
    elif hosts.current().is_writer:
        t5x_step.write(directory, index, values, axes)


def finish_step(directory: pathlib.Path, index: leaves.Index, *, layout: Layout) -> None:
    """Writes what a step has once, however many processes wrote its arrays."""
    if layout == "tekoa":
        array_writes.merge(directory)
        leaves.write_index(directory, index)
