"""`run.json`: what produced a run, at every start. Imports no JAX.

The top level of the file describes the newest start. `starts` lists all of them, oldest first:
the first is complete, the others contain the id, the time, the step and the values that have
changed. The id is the one in the manifests of the checkpoints that this start writes.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import tekoa
from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import durable, identity

RUN_FILE = "run.json"
END_FILE = "train_end.json"
SOURCE_DIR = "source"

# Reported even if they are not loaded yet.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "tensorstore")
_OF_EACH_START = ("id", "time", "step", "command")
_GIT_SECONDS = 5.0
_MAX_BYTES = 2**26
# Fields that the commands use, and what they must be.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "random_seed": int,
    "command": list,
    "model": str,
    "settings": (dict, type(None)),
    "flags": dict,
    "given": list,
    "versions": dict,
    "data": dict,
    "devices": dict,
    "sources": dict,
    "starts": list,
    "n_steps": (int, type(None)),
    "scales": dict,
    "classes": list,
    "step": int,
}


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the contents of a file such as `run.json`; empty if it does not exist.

    Raises:
        errors.DamagedError: If the file is not what Tekoa writes.
    """
    try:
        facts = files.read_json(path, max_bytes=_MAX_BYTES)
        for name in facts.keys() & _TYPES.keys():
            if not isinstance(facts[name], _TYPES[name]) or not _is_plausible(facts[name]):
                raise ValueError(f"{name!r} is {str(facts[name])[:40]!r}")
        if not all(isinstance(scale, int | float) for scale in facts.get("scales", {}).values()):
            raise ValueError("'scales' contains something else than numbers")
        return facts
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise  # This is no damage.
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.DamagedError(
            f"{path}: is damaged: {reason}. Restore it from a backup, or remove it."
        ) from None


def _is_plausible(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) < 2**63


def write_start(
    directory: str | os.PathLike[str],
    facts: Mapping[str, Any],
    *,
    step: int,
    sources: Iterable[str | os.PathLike[str]] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adds a start to `run.json`, and copies the files that define the run.

    Args:
        directory: The directory of the run.
        facts: What the caller knows about the run, such as settings and seed.
        step: The step at which this start begins.
        sources: Files to copy, such as the model file. Copies of earlier starts are kept.

    Returns:
        The record of the previous start (empty if there is none), and the new one.

    Raises:
        errors.DamagedError: If `run.json` is damaged.
        OSError: If a file cannot be written.
    """
    directory, sources = pathlib.Path(directory), [pathlib.Path(path) for path in sources]
    before = read(directory / RUN_FILE)
    earlier = before.pop("starts", [before] if before else [])
    start = {
        "id": identity.start_id(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "step": step,
        "command": list(sys.argv),
        **facts,
        "versions": versions(),
        "git": git_state(sources[0].parent if sources else pathlib.Path.cwd()),
        "sources": {str(path): _copy(path, directory / SOURCE_DIR) for path in sources},
    }
    start = json.loads(json.dumps(start, default=str))
    changed = {
        name: value
        for name, value in start.items()
        if name in _OF_EACH_START or not before or value != before.get(name)
    }
    record = {**start, "starts": [*earlier, changed]}
    durable.replace(directory / RUN_FILE, json.dumps(record, indent=1).encode())
    return before, start


def starts_of(record: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Returns the id of every start in a record, and the step at which it began.

    Starts that earlier versions recorded have no id and are left out.
    """
    starts = [start for start in record.get("starts", []) if isinstance(start, dict)]
    named = [(start.get("id"), start.get("step")) for start in starts]
    return [(id, n) for id, n in named if isinstance(id, str) and id and isinstance(n, int)]


def write_end(directory: str | os.PathLike[str], step: int) -> None:
    """Writes the end mark of a run, which holds its last step."""
    durable.replace(pathlib.Path(directory) / END_FILE, json.dumps({"step": step}).encode())


def remove_end(directory: str | os.PathLike[str]) -> None:
    """Removes the end mark of a run that is trained further."""
    (pathlib.Path(directory) / END_FILE).unlink(missing_ok=True)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describes the values that differ between two records, one per line.

    >>> changes({'settings': {'rate': 1.0, 'n': 2}}, {'settings': {'rate': 5.0, 'n': 2}})
    ['rate: 1.0 -> 5.0']
    """
    lines = []
    for part in ("settings", "flags", "data", "devices", "sources", "versions"):
        old, new = (_named(part, record.get(part) or {}) for record in (before, after))
        # Settings come and go with the model; flags and packages that only one start has do not
        # matter to both.
        names = {**old, **new} if part == "settings" else [name for name in new if name in old]
        lines += [
            f"{name}: {_text(old.get(name))} -> {_text(new.get(name))}"
            for name in names
            if old.get(name) != new.get(name)
        ]
    return lines


def versions(also: Iterable[str] = ()) -> dict[str, str]:
    """Returns the versions of Python, Tekoa, all packages that are loaded, and others by name."""
    loaded = {name for name in list(sys.modules) if "." not in name and not name.startswith("_")}
    names = [
        *PACKAGES,
        *also,
        *sorted(loaded - set(sys.stdlib_module_names) - {*PACKAGES, "tekoa"}),
    ]
    versions_by_name = {"tekoa": tekoa.__version__, "python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions_by_name[name] = importlib.metadata.version(name)
    return versions_by_name


def devices() -> dict[str, Any]:
    """Returns the kind and the number of devices. Imports JAX."""
    import jax

    all_devices = jax.devices()
    return {"kind": all_devices[0].device_kind, "count": len(all_devices)}


def git_state(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the commit of a directory and whether tracked files differ; empty without git."""
    command = ["git", "-C", str(directory), "status", "--porcelain=v2", "--branch"]
    try:
        result = subprocess.run(
            [*command, "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = result.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid")), None)
    return {"commit": commit, "is_dirty": any(not line.startswith("#") for line in lines)}


def copy_name(path: pathlib.Path) -> str | None:
    """Returns the name of a file's copy, which contains a digest; None if it cannot be read."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
    return f"{path.stem}-{digest[:12]}{path.suffix}"


def _copy(path: pathlib.Path, directory: pathlib.Path) -> str | None:
    """Copies a file under a name with its checksum; returns the name, or None if it is gone."""
    name = copy_name(path)
    if name is not None and not (directory / name).exists():
        directory.mkdir(exist_ok=True)
        durable.replace(directory / name, path.read_bytes())
    return name


def _named(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a part of the record under the names that the user knows."""
    if part == "settings":
        return flatten(values)
    prefix = {"data": "data of ", "devices": "device ", "flags": "--"}.get(part, "")
    return {f"{prefix}{name}": value for name, value in values.items()}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings under dotted names."""
    flat = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def _text(value: Any) -> str:
    return "not set" if value is None else str(value)
