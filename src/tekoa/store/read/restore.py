"""Restores stored leaves into target trees: same names, shapes and dtypes, or an error."""

import dataclasses
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from tekoa import hosts
from tekoa.core import trees
from tekoa.sharding import placement
from tekoa.store import errors
from tekoa.store.commit import identity, manifest, paths, together
from tekoa.store.formats.index import Index
from tekoa.store.formats.leaves import Leaf, describe, flatten, is_function
from tekoa.store.formats.step import OpenStep, find, open_step
from tekoa.store.read import newest


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedStep:
    """A step restored from disk.

    Attributes:
        step: Completed optimizer steps.
        items: Trees with the structure of the targets, by item.
        meta: The JSON values stored with the step.
        metrics: The numbers that retention compares.
        commit: The identity of the step.
        skipped: Newer steps that are damaged.
    """

    step: int
    items: dict[str, Any]
    meta: dict[str, Any]
    metrics: dict[str, float]
    commit: identity.CommitId
    skipped: list[newest.SkippedStep] = dataclasses.field(default_factory=list)


def restore(
    directory: str | os.PathLike[str],
    targets: Mapping[str, trees.PyTree],
    *,
    step: int | None = None,
    verify: manifest.Verify = "full",
    cast: bool = False,
    zeros_if_missing: Collection[str] = (),
) -> LoadedStep | None:
    """Restores the newest valid step of a directory, without changing anything there.

    With several processes, all restore the same step; each verifies a share of the files and
    reads its own shards.

    Args:
        directory: A directory of steps.
        targets: Trees by item name, of arrays or `jax.ShapeDtypeStruct`s, with the structure,
            shapes, dtypes and shardings of the result. Other items are not read.
        step: Restore this step only; by default the newest valid one.
        verify: How thoroughly to check a step before using it.
        cast: Convert numbers to the target's dtype if it differs.
        zeros_if_missing: Items in which leaves that the checkpoint does not have are zeros.

    Returns:
        The restored trees, or None if the directory has no step at all.

    Raises:
        errors.MismatchError: If the checkpoint does not match the targets; lists all
            differences.
        errors.NothingUsableError: If there are steps, but all are damaged.
        errors.DamagedError: If the requested step is damaged.
    """
    options: dict[str, Any] = {"cast": cast, "zeros_if_missing": zeros_if_missing}
    if step is not None:
        return restore_step(open_step(find(directory, step), verify=verify), targets, **options)

    def list_steps(directory: str | os.PathLike[str]) -> list[int]:
        return hosts.current().broadcast("list of the steps", paths.list_steps(directory))

    def use(path: pathlib.Path) -> LoadedStep:
        opened = open_together(path, verify=verify)
        steps: list[LoadedStep] = []

        def read() -> None:
            steps.append(restore_step(opened, targets, **options))

        together.run_on_all(hosts.current(), f"reading of {path.name}", read, lambda _: None)
        return steps[0]

    valid = newest.newest_valid(directory, use, list_steps=list_steps)
    return valid and dataclasses.replace(valid.value, skipped=valid.skipped)


def open_together(path: str | os.PathLike[str], *, verify: manifest.Verify = "full") -> OpenStep:
    """Opens a step on all processes of the group; each verifies a share of its files.

    Args:
        path: The directory of the step; the same step on all.
        verify: How thoroughly to check it.

    Raises:
        errors.DamagedError: On all processes, if one of them found damage.
        errors.StoreError: On all processes, if they do not see the same commit.
    """
    group, what = hosts.current(), f"check of {pathlib.Path(path).name}"
    opened: list[OpenStep] = []

    def check() -> str:
        opened.append(open_step(path, verify=verify, part=(group.index, group.count)))
        return opened[0].commit.digest

    def compare(digests: list[str]) -> None:
        for index, digest in enumerate(digests):
            if digest != digests[0]:
                raise errors.StoreError(
                    f"{path}: contains another commit on process {index} (manifest {digest[:12]}) "
                    f"than on process 0 ({digests[0][:12]}). All processes must read the same "
                    "directory: use a shared file system, or copy the step again."
                )

    together.run_on_all(group, what, check, compare)
    return opened[0]


def restore_step(
    source: OpenStep,
    targets: Mapping[str, trees.PyTree],
    *,
    cast: bool = False,
    zeros_if_missing: Collection[str] = (),
) -> LoadedStep:
    """Restores from one opened step; see `restore`."""
    index = source.index
    flat = {name: leaf for name, leaf in flatten(targets).items() if not is_function(leaf)}
    zeros = {
        name: np.zeros(leaf.shape, leaf.dtype)
        for name, leaf in flat.items()
        if name[0] in zeros_if_missing and name not in index.leaves
    }
    flat = {name: leaf for name, leaf in flat.items() if name not in zeros}
    differences = _differences(index, targets, flat, cast=cast)
    if differences:
        raise errors.MismatchError(
            f"Step {index.step} does not match the targets: {len(differences)} differences.\n  "
            + "\n  ".join(differences)
            + "\nUse the model and optimizer it was saved with. `warm_start` loads only matching "
            "parameters, `migrate` only matching parts of an optimizer state.",
            differences,
        )
    stored = {name: index.leaves[name] for name in flat}
    # Leaves to be cast are read completely: the shards on disk have the other dtype.
    shardings = {
        name: leaf.sharding
        for name, leaf in flat.items()
        if _is_spread(leaf) and stored[name].dtype == leaf.dtype.name
    }
    values = {**_place(source.read(stored, shardings), stored, flat), **zeros}
    items = {
        item: trees.map_named(lambda name, leaf, item=item: values.get((item, *name), leaf), tree)
        for item, tree in targets.items()
    }
    return LoadedStep(
        step=index.step,
        items=items,
        meta=index.meta,
        metrics=index.metrics,
        commit=source.commit,
    )


def _differences(
    index: Index,
    targets: Mapping[str, trees.PyTree],
    flat: Mapping[trees.Name, Any],
    *,
    cast: bool,
) -> list[str]:
    lines = []
    # An item without leaves, such as the state of a stateless optimizer, may be missing.
    for item in dict.fromkeys(name[0] for name in flat):
        if item not in index.items:
            lines.append(f"{item}: the checkpoint has no such item, only {sorted(index.items)}")
    for name, target in flat.items():
        if name[0] not in index.items:
            continue
        expected = _expected_leaf(name, target)
        stored = index.leaves.get(name)
        if stored is None:
            lines.append(f"{'/'.join(name)}: missing in the checkpoint, expected {expected}")
        elif (
            (stored.kind == "key") != (expected.kind == "key")
            or (stored.kind == "key" and stored.detail != expected.detail)
            or stored.shape != expected.shape
            or (stored.dtype != expected.dtype and not (cast and stored.kind != "key"))
        ):
            lines.append(f"{'/'.join(name)}: stored as {stored}, expected {expected}")
    for name, stored in index.leaves.items():
        if name[0] in targets and name not in flat:
            lines.append(f"{'/'.join(name)}: only in the checkpoint, {stored}")
    return lines


def _expected_leaf(name: trees.Name, target: Any) -> Leaf:
    """Describes the stored leaf that would match a target leaf, which may be abstract."""
    is_abstract = isinstance(target, jax.ShapeDtypeStruct)
    if is_abstract and not trees.is_key(target):
        return Leaf(name=name, shape=target.shape, dtype=target.dtype.name)
    described: list[Any] = []
    if is_abstract:
        # Only a traced key has an implementation and the shape of its data.
        jax.eval_shape(lambda key: described.append(describe(name, key)), target)
    else:
        described.append(describe(name, target))
    return described[0][0]


def _is_spread(target: Any) -> bool:
    """Returns whether a target is on several devices, so that it is read shard by shard."""
    sharding = getattr(target, "sharding", None)
    return sharding is not None and not trees.is_key(target) and len(sharding.device_set) > 1


def _place(
    values: Mapping[trees.Name, Any],
    stored: Mapping[trees.Name, Leaf],
    flat: Mapping[trees.Name, Any],
) -> dict[trees.Name, Any]:
    """Converts the values read to the kinds of the target leaves, on their devices."""
    placed = {name: _convert(values[name], stored[name], flat[name]) for name in flat}
    shardings = {
        name: getattr(target, "sharding", None)
        for name, target in flat.items()
        if isinstance(target, jax.Array | jax.ShapeDtypeStruct)
    }
    on_devices = placement.put([placed[name] for name in shardings], list(shardings.values()))
    for name, value in zip(shardings, on_devices, strict=True):
        if value.dtype != flat[name].dtype:
            raise errors.MismatchError(
                f"{'/'.join(name)}: this JAX converts {flat[name].dtype} to {value.dtype}. "
                "Set jax_enable_x64 to restore 64-bit values."
            )
        placed[name] = value
    return placed


def _convert(value: Any, stored: Leaf, target: Any) -> Any:
    """Converts a value read to the kind and dtype of a target leaf."""
    if stored.kind == "key":
        return jax.random.wrap_key_data(value, impl=stored.detail)
    if isinstance(target, bool | int | float | complex) and not isinstance(target, np.generic):
        return type(target)(np.asarray(value).item())
    return value if value.dtype == target.dtype else np.asarray(value).astype(target.dtype)
