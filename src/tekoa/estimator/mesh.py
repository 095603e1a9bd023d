"""The layout that the command's flags and the model file ask for."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from tekoa.core import hosts, sharding, sharding_mesh
from tekoa.core.sharding_specs import Entry, Rule
from tekoa.estimator.config import RunConfig, UsageError
from tekoa.estimator.run import Run

_FLAGS = ("mesh", "num_partitions", "model_parallel_submesh", "sharding_rules", "optimizer_rules")


def layout_of(run: Run) -> sharding.Layout | None:
    """Gives the layout of a run; None for one device.

    Without flags rows go over all devices, of all processes; on CPU, where the devices of
    one machine are one, a process by itself uses one.

    Raises:
        UsageError: If the flags cannot be read, or contradict one another.
        LayoutError: If they do not fit the devices there are.
    """
    config = run.config
    is_asked = any(name in config.given for name in _FLAGS)
    is_alone = hosts.current().count == 1
    if not is_asked and is_alone and (jax.default_backend() == "cpu" or len(jax.devices()) == 1):
        return None
    mesh = sharding_mesh.make_mesh(**sizes_of(config), submesh=submesh_of(config))
    return make_layout(run, mesh)


def make_layout(run: Run, mesh: sharding_mesh.AnyMesh) -> sharding.Layout:
    """Lays a run out on a mesh by the rules of its flags and its model file."""
    config = run.config
    named = getattr(run.settings, "logical_axis_rules", None)
    named = named or getattr(run.module, "LOGICAL_AXIS_RULES", ())
    return sharding.Layout(
        mesh=mesh,
        rules=parse_rules(config.sharding_rules, "sharding_rules"),
        optimizer_rules=parse_rules(config.optimizer_rules, "optimizer_rules"),
        logical_axis_rules=[(name, _entry(axes)) for name, axes in named],
    )


def sizes_of(config: RunConfig) -> dict[str, Any]:
    """Reads `--mesh=data=2,model=4` and `--num_partitions=4`.

    Raises:
        UsageError: If they cannot be read, or contradict one another.
    """
    sizes: dict[str, Any] = {"data": None, "fsdp": 1, "model": 1}
    for part in filter(None, (config.mesh or "").split(",")):
        name, _, text = part.strip().partition("=")
        if name not in sizes or not text.isdigit():
            raise UsageError(
                f"--mesh must look like data=2,fsdp=2,model=4 (each may be left out), got "
                f"{part.strip()!r} in {config.mesh!r}."
            )
        sizes[name] = int(text)
    submesh = submesh_of(config)
    n = config.num_partitions if submesh is None else math.prod(submesh)
    asked = ("num_partitions", config.num_partitions), ("mesh model", sizes["model"])
    for flag, value in asked:
        if value not in (1, n) and n != 1:
            raise UsageError(f"--{flag}={value} contradicts {n} partitions of the model.")
    return {**sizes, "model": max(n, sizes["model"])}


def submesh_of(config: RunConfig) -> tuple[int, ...] | None:
    """Reads `--model_parallel_submesh=2,2,1,1`.

    Raises:
        UsageError: If it is not a list of sizes.
    """
    parts = config.model_parallel_submesh
    if not parts:
        return None
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UsageError(
            f"--model_parallel_submesh must be sizes such as 2,2,1,1, got {','.join(parts)!r}."
        )
    return tuple(int(part) for part in parts)


def parse_rules(text: str | None, flag: str) -> dict[str, Rule] | str:
    """Reads `data`, or `PATTERN=data; PATTERN=model,-; ...`, as `Layout` takes rules.

    Raises:
        UsageError: If it cannot be read.

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
                f"--{flag} must be the name of a mesh axis, or PATTERN=AXES; PATTERN=AXES where "
                f"AXES has a mesh axis or - per dimension, such as model,-; got {part!r}."
            )
        entries = [_parsed_entry(axis.strip()) for axis in axes.split(",")]
        rules[pattern] = axes if axes.isidentifier() else tuple(entries)
    return rules


def _parsed_entry(text: str) -> Entry:
    if text in ("", "-"):
        return None
    return tuple(text.split("+")) if "+" in text else text


def _entry(axes: Any) -> Entry:
    return tuple(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else axes
