"""The layout requested by the flags and the model file."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from tekoa import hosts
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.run.run import Run
from tekoa.sharding import layout
from tekoa.sharding import mesh as mesh_lib
from tekoa.sharding.specs import Entry, Rule

FLAGS = ("mesh", "num_partitions", "model_parallel_submesh", "sharding_rules", "optimizer_rules")


def layout_of(run: Run) -> layout.Layout | None:
    """Returns the layout of a run; None for one device.

    Without flags, rows are split over all devices of all processes. On CPU, where all devices
    share the same cores, a single process uses one device.

    Raises:
        UsageError: If the flags are malformed, or contradict one another.
        LayoutError: If they do not fit the available devices.
    """
    config = run.config
    has_flags = any(name in config.set_flags for name in FLAGS)
    is_alone = hosts.current().count == 1
    if not has_flags and is_alone and (jax.default_backend() == "cpu" or len(jax.devices()) == 1):
        return None
    mesh = mesh_lib.make_mesh(**sizes_of(config), submesh=submesh_of(config))
    return make_layout(run, mesh)


def refuse_flags(config: RunConfig, reason: str) -> None:
    """Raises UsageError if a flag requests a layout where none is possible."""
    requested = [f"--{name}" for name in FLAGS if name in config.set_flags]
    if requested:
        raise UsageError(f"{', '.join(requested)} cannot be used here: {reason}.")


def make_layout(run: Run, mesh: mesh_lib.AnyMesh) -> layout.Layout:
    """Creates the layout on a mesh from the rules of the flags and the model file."""
    config = run.config
    axis_rules = getattr(run.settings, "logical_axis_rules", None)
    axis_rules = axis_rules or getattr(run.module, "LOGICAL_AXIS_RULES", ())
    return layout.Layout(
        mesh=mesh,
        rules=parse_rules(config.sharding_rules, "sharding_rules"),
        optimizer_rules=parse_rules(config.optimizer_rules, "optimizer_rules"),
        logical_axis_rules=[(name, _entry(axes)) for name, axes in axis_rules],
    )


def sizes_of(config: RunConfig) -> dict[str, Any]:
    """Parses `--mesh=data=2,model=4` and `--num_partitions=4`.

    Raises:
        UsageError: If they are malformed, or contradict one another.
    """
    sizes: dict[str, Any] = {"data": None, "fsdp": 1, "model": 1}
    for part in filter(None, (config.mesh or "").split(",")):
        name, _, text = part.strip().partition("=")
        if name not in sizes or not text.isdecimal():
            raise UsageError(
                f"--mesh must look like data=2,fsdp=2,model=4 (each is optional), got "
                f"{part.strip()!r} in {config.mesh!r}."
            )
        sizes[name] = int(text)
    submesh = submesh_of(config)
    n = config.num_partitions if submesh is None else math.prod(submesh)
    requested = ("num_partitions", config.num_partitions), ("mesh model", sizes["model"])
    for flag, value in requested:
        if value not in (1, n) and n != 1:
            raise UsageError(f"--{flag}={value} contradicts {n} partitions of the model.")
    return {**sizes, "model": max(n, sizes["model"])}


def submesh_of(config: RunConfig) -> tuple[int, ...] | None:
    """Parses `--model_parallel_submesh=2,2,1,1`, also with parentheses around it.

    Raises:
        UsageError: If it is not a list of sizes.
    """
    text = ",".join(config.model_parallel_submesh)
    if not text:
        return None
    is_tuple = re.fullmatch(r"\(([^()]*?),?\)", text.strip())
    parts = (text if is_tuple is None else is_tuple[1]).split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            f"--model_parallel_submesh must be sizes such as 2,2,1,1 or (2,2,1,1), got {text!r}."
        )
    return tuple(int(part) for part in parts)


def parse_rules(text: str | None, flag: str) -> dict[str, Rule] | str:
    """Parses `data`, or `PATTERN=data; PATTERN=model,-; ...`, into rules for `Layout`.

    Raises:
        UsageError: If the text is malformed.

    >>> parse_rules('embedding=model,fsdp+data; bias=-; .*=data', 'optimizer_rules')
    {'embedding': ('model', ('fsdp', 'data')), 'bias': (None,), '.*': 'data'}
    """
    text = (text or "").strip()
    if not text:
        return {}
    if text.isidentifier():
        return text
    rules: dict[str, Rule] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        pattern, equals, axes = part.rpartition("=")
        if not equals or not pattern or not axes:
            raise UsageError(
                f"--{flag} must be the name of a mesh axis, or PATTERN=AXES; PATTERN=AXES, where "
                f"AXES is a mesh axis or - for each dimension, such as model,-; got {part!r}."
            )
        entries = [_parse_entry(axis.strip()) for axis in axes.split(",")]
        rules[pattern] = axes if axes.isidentifier() else tuple(entries)
    return rules


def _parse_entry(text: str) -> Entry:
    if text in ("", "-"):
        return None
    return tuple(text.split("+")) if "+" in text else text


def _entry(axes: Any) -> Entry:
    return tuple(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else axes
