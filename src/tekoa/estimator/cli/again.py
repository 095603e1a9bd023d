"""`tekoa train --again=RUN`: the flags of a run, from its record. Imports no JAX."""

import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from tekoa.core import files
from tekoa.estimator.cli.run_config import FIELDS, FLAG_NAMES, RunConfig, UsageError
from tekoa.extensions import run_record

# How a start is carried out, not what it computes.
_NOT_REPEATED = {
    *("again", "compile_cache", "coordinator_address", "host_timeout_secs", "json", "mode"),
    *("model_dir", "num_processes", "process_id", "profile_steps", "profiler_port", "progress"),
}
_SOURCES = ("module_imp", "module_config")


def repeat(config: RunConfig) -> RunConfig:
    """Returns the flags of the run that `--again` names; flags of the command line win.

    The new run is in `RUN-again` unless `--model_dir` is set. A model file that has changed since
    is replaced by the copy that the run keeps.

    Raises:
        UsageError: If there is no record of such a run.
        errors.DamagedError: If the record is damaged.
    """
    run = files.local_path(config.again or "").absolute()
    record = run_record.read(run / run_record.RUN_FILE)
    if not record.get("flags"):
        raise UsageError(
            f"--again={config.again}: there is no record of a run of `tekoa train`, "
            f"{run / run_record.RUN_FILE}."
        )
    flags: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in record["flags"].items()
        if name in FLAG_NAMES
    }
    # Other flags have the defaults of the model file, which is repeated too.
    given = set(record.get("given", _changed(flags))) & flags.keys() - _NOT_REPEATED
    repeated = {name: flags[name] for name in given}
    repeated |= {name: _source(run, record, flags.get(name)) for name in _SOURCES}
    repeated |= {"random_seed": record["random_seed"], "model_dir": f"{run}-again"}
    new_config = config.with_defaults(repeated)
    if pathlib.Path(new_config.model_dir or "").absolute() == run:
        raise UsageError(f"--model_dir={new_config.model_dir} is the run itself. Name another one.")
    _print_notes(run, record)
    return dataclasses.replace(
        new_config,
        overrides={**record["flags"].get("overrides", {}), **config.overrides},
        given=config.given | given | {"random_seed", "model_dir"},
    )


def _changed(flags: Mapping[str, Any]) -> list[str]:
    """Returns the flags that are not at their defaults."""
    return [name for name, value in flags.items() if value != FIELDS[name].default]


def _source(run: pathlib.Path, record: Mapping[str, Any], name: str | None) -> str | None:
    """Returns the model file as it was: itself if it has not changed, or the copy in the run."""
    if name is None or not name.endswith(".py"):
        return name
    for original, copy in record.get("sources", {}).items():
        path = pathlib.Path(original)
        if copy is None or path.name != pathlib.Path(name).name:
            continue
        stored = run / run_record.SOURCE_DIR / copy
        if path.is_file() and _digest(path) == _digest(stored):
            return original
        _print(f"{original} has changed since: using the copy {stored}.")
        return str(stored)
    return name


def _digest(path: pathlib.Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _print_notes(run: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Prints what may make the result differ from that of the run."""
    first, *later = record.get("starts") or [record]
    flags, changed = _lasting(first), []
    for start in later:
        new_flags = _lasting(start) if "flags" in start else flags
        if new_flags != flags or start.keys() & {"settings", "sources"}:
            changed.append(start["step"])
        flags = new_flags
    if changed:
        steps = ", ".join(map(str, changed))
        _print(f"{run} changed its settings at step {steps}: using the last ones from the start.")
    versions = {"versions": run_record.versions()}
    for line in run_record.changes({"versions": record.get("versions", {})}, versions):
        _print(f"Another version than in {run}: {line}")


def _lasting(start: Mapping[str, Any]) -> dict[str, Any]:
    return {n: value for n, value in start["flags"].items() if n not in _NOT_REPEATED}


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
