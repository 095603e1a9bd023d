"""What a tracking service has to do, and the facts that it receives about a run."""

import dataclasses
import math
import os
import pathlib
import platform
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tekoa.extensions import run_record
from tekoa.loop.media import Media


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a service is told about a run.

    Attributes:
        name: Name of the run: that of its directory.
        project: Project or experiment to which it belongs.
        config: Hyper-parameters and system facts, nested.
        directory: Directory of the run, or None if it has none.
        claim: Stores the id of a new run. A service calls it as early as it can: a program that is
            killed before would leave a run behind, and begin another one.
    """

    name: str
    project: str
    config: Mapping[str, Any]
    directory: pathlib.Path | None
    claim: Callable[[str], None] = lambda run_id: None


class Service(Protocol):
    """A tracking service. Only one thread calls it."""

    def open(self, run_id: str | None, facts: RunFacts) -> tuple[str, int]:
        """Opens a run: a new one, or that of an id; returns its id and the last step it has.

        The id may be empty if there is only one run. Without points the last step is -1. Steps
        that are logged afterwards are higher.
        """
        ...

    def log(self, row: Mapping[str, Any], media: Mapping[str, Media]) -> None:
        """Stores the points of one step; `row` is a line of `metrics.jsonl`."""
        ...

    def close(self) -> None:
        """Ends the run; it may be opened again."""
        ...


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row, without the step.

    >>> numbers({'step': 3, 'train/loss': 0.5, 'train/acc': None})
    {'train/loss': 0.5}
    """
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and value is not None and math.isfinite(value)
    }


def config_of(directory: pathlib.Path | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `run.json` knows about a run, system facts, and the user's own `config`."""
    record = {} if directory is None else run_record.read(directory / run_record.RUN_FILE)
    names = ("model", "random_seed", "n_steps", "settings", "optimizer", "git")
    known = {name: record[name] for name in names if record.get(name)}
    known["versions"] = {
        name: version
        for name, version in run_record.versions().items()
        if name in ("tekoa", "python", *run_record.PACKAGES)
    }
    flags, set_flags = record.get("flags", {}), record.get("given", ())
    if set_flags:
        known["flags"] = {name: flags[name] for name in set_flags if name in flags}
    return {**known, "command": record.get("command", []), "system": _system(), **config}


def _system() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "n_cpus": os.cpu_count(),
        "devices": run_record.devices(),
    }


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings under joined names.

    >>> flatten({'settings': {'rate': 0.1}, 'seed': 3})
    {'settings.rate': 0.1, 'seed': 3}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat
