"""Stored leaves into the trees of a target: same names, shapes and dtypes, or an error."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tekoa.core import hosts, putting, trees
from tekoa.store import errors, leaves, manifest, names, steps, together, walkback


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What came back from disk.

    Attributes:
        step: Completed optimizer steps.
        items: Trees of the targets' structure, by item.
        meta: The JSON values stored with the step.
        metrics: The numbers that retention compares.
        skipped: Newer steps that are damaged.
    """

    step: int
    items: dict[str, Any]
    meta: dict[str, Any]
    metrics: dict[str, float]
    skipped: list[walkback.Skipped] = dataclasses.field(default_factory=list)


def restore(
    directory: str | os.PathLike[str],
    targets: Mapping[str, trees.PyTree],
    *,
    step: int | None = None,
    verify: manifest.Verify = "full",
    cast: bool = False,
) -> Restored | None:
    """Restores the newest good step of a directory, without changing anything there.

    Args:
        directory: A directory of steps.
        targets: Trees by item name, of arrays or `jax.ShapeDtypeStruct`s: they give
            structure, shapes, dtypes and shardings. Items of the checkpoint that are
            not asked for are not read.
        step: This step and no other; None walks back from the newest.
        verify: How much of a step to check before using it.
        cast: Convert numbers to the target's dtype where they differ.

    Returns:
        The restored trees, or None if the directory has no step at all.

    Raises:
        errors.MismatchError: If the checkpoint does not fit, with all differences.
        errors.NothingUsableError: If there are steps, but all are damaged.
        errors.DamagedError: If the step asked for is damaged.
    """

    def use(path: os.PathLike[str]) -> Restored:
        return restore_step(steps.open_step(path, verify=verify), targets, cast=cast)

    if step is not None:
        return use(steps.find(directory, step))
    if hosts.current().count > 1:
        return _restore_together(hosts.current(), directory, targets, verify=verify, cast=cast)
    found = walkback.newest_usable(directory, use)
    return found and dataclasses.replace(found.value, skipped=found.skipped)


def _restore_together(
    group: hosts.Hosts,
    directory: str | os.PathLike[str],
    targets: Mapping[str, trees.PyTree],
    *,
    verify: manifest.Verify,
    cast: bool,
) -> Restored | None:
    """All look at the same steps; each checks its share of the files and reads its shards."""

    def list_steps(where: str | os.PathLike[str]) -> list[int]:
        return group.broadcast("list of the steps", names.list_steps(where))

    def use(path: pathlib.Path) -> Restored:
        opened = open_together(path, verify=verify)
        found: list[Restored] = []
        together.run(
            group,
            f"reading of {path.name}",
            lambda: found.append(restore_step(opened, targets, cast=cast)),
        )
        return found[0]

    found = walkback.newest_usable(directory, use, list_steps=list_steps)
    return found and dataclasses.replace(found.value, skipped=found.skipped)


def open_together(
    path: str | os.PathLike[str], *, verify: manifest.Verify = "full"
) -> steps.OpenStep:
    """Opens one step on all processes of the group, each of which checks a part of it.

    Args:
        path: The directory of the step; the same step on all.
        verify: How much of it to check first.

    Raises:
        errors.DamagedError: On all, if one of them found it not whole.
    """
    group = hosts.current()
    opened: list[steps.OpenStep] = []
    together.run(
        group,
        f"check of {pathlib.Path(path).name}",
        lambda: opened.append(
            steps.open_step(path, verify=verify, part=(group.index, group.count))
        ),
    )
    return opened[0]


def restore_step(
    source: steps.OpenStep, targets: Mapping[str, trees.PyTree], *, cast: bool = False
) -> Restored:
    """Restores from one opened step; see `restore`."""
    index = source.index
    wanted = {
        name: leaf for name, leaf in leaves.flatten(targets).items() if not leaves.is_function(leaf)
    }
    differences = _differences(index, targets, wanted, cast=cast)
    if differences:
        raise errors.MismatchError(
            f"Step {index.step} does not fit: {len(differences)} differences.\n  "
            + "\n  ".join(differences)
            + "\nUse the model and optimizer it was saved with; `warm_start` takes over "
            "parameters that match, `migrate` an optimizer's state.",
            differences,
        )
    stored = {name: index.leaves[name] for name in wanted}
    spread = {name: s for name, leaf in wanted.items() if (s := _spread_sharding(leaf))}
    # What is to be cast is read whole: the shards on disk have the other dtype.
    spread = {n: s for n, s in spread.items() if stored[n].dtype == wanted[n].dtype.name}
    values = source.read(stored, spread)
    placed = _place(values, stored, wanted)
    items = {
        item: trees.map_named(lambda name, leaf, item=item: placed.get((item, *name), leaf), tree)
        for item, tree in targets.items()
    }
    return Restored(step=index.step, items=items, meta=index.meta, metrics=index.metrics)


def _differences(
    index: leaves.Index,
    targets: Mapping[str, trees.PyTree],
    wanted: Mapping[trees.Name, Any],
    *,
    cast: bool,
) -> list[str]:
    lines = []
    # An item without leaves, such as a stateless optimizer's, need not be there.
    for item in dict.fromkeys(name[0] for name in wanted):
        if item not in index.items:
            lines.append(f"{item}: the checkpoint has no such item, only {sorted(index.items)}")
    for name, target in wanted.items():
        if name[0] not in index.items:
            continue
        expected = _expect(name, target)
        stored = index.leaves.get(name)
        where = "/".join(name)
        if stored is None:
            lines.append(f"{where}: missing in the checkpoint, expected {_show(expected)}")
        elif (
            (stored.kind == "key") != (expected.kind == "key")
            or (stored.kind == "key" and stored.detail != expected.detail)
            or stored.shape != expected.shape
            or (stored.dtype != expected.dtype and not (cast and stored.kind != "key"))
        ):
            lines.append(f"{where}: stored as {_show(stored)}, expected {_show(expected)}")
    for name, stored in index.leaves.items():
        if name[0] in targets and name not in wanted:
            lines.append(f"{'/'.join(name)}: only in the checkpoint, {_show(stored)}")
    return lines


def _expect(name: trees.Name, target: Any) -> leaves.Leaf:
    """Describes the leaf that would fit a target leaf, which may be abstract."""
    if not isinstance(target, jax.ShapeDtypeStruct):
        described = leaves.describe(name, target)
        if described is None:
            raise TypeError(f"Target leaf {'/'.join(name)!r} is a function; it holds no numbers.")
        return described[0]
    if leaves.is_key(target):
        return _expect_key(name, target)
    return leaves.Leaf(name=name, shape=target.shape, dtype=target.dtype.name)


def _expect_key(name: trees.Name, target: jax.ShapeDtypeStruct) -> leaves.Leaf:
    # Only a traced key tells its implementation and the shape of its data.
    found = []
    jax.eval_shape(lambda key: found.append(leaves.describe(name, key)), target)
    return found[0][0]


def _show(leaf: leaves.Leaf) -> str:
    shape = ",".join(map(str, leaf.shape))
    return f"{leaf.dtype}[{shape}]" + (f" (PRNG key, {leaf.detail})" if leaf.kind == "key" else "")


def _spread_sharding(target: Any) -> jax.sharding.Sharding | None:
    """Gives the sharding of a target over several devices, to be read shard by shard."""
    sharding = getattr(target, "sharding", None)
    if sharding is None or leaves.is_key(target):
        return None
    return sharding if len(sharding.device_set) > 1 else None


def _place(
    values: Mapping[trees.Name, Any],
    stored: Mapping[trees.Name, leaves.Leaf],
    wanted: Mapping[trees.Name, Any],
) -> dict[trees.Name, Any]:
    """Turns what was read into leaves of the targets' kinds, on their devices."""
    placed: dict[trees.Name, Any] = {}
    for name, target in wanted.items():
        value = values[name]
        if stored[name].kind == "key":
            value = jax.random.wrap_key_data(value, impl=stored[name].detail)
        elif isinstance(target, bool | int | float | complex) and not isinstance(
            target, np.generic
        ):
            placed[name] = type(target)(np.asarray(value).item())
            continue
        elif value.dtype != target.dtype:
            value = np.asarray(value).astype(target.dtype)
        placed[name] = value
    on_devices = {
        name: getattr(target, "sharding", None)
        for name, target in wanted.items()
        if isinstance(target, jax.Array | jax.ShapeDtypeStruct)
    }
    moved = putting.put([placed[name] for name in on_devices], list(on_devices.values()))
    for name, value in zip(on_devices, moved, strict=True):
        if value.dtype != wanted[name].dtype:
            raise errors.MismatchError(
                f"{'/'.join(name)}: this JAX turns {wanted[name].dtype} into {value.dtype}. "
                "Set jax_enable_x64 to restore 64-bit values."
            )
        placed[name] = value
    return placed
