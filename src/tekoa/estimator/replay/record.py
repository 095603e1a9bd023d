"""What `run.json` says about a run: which settings produced which steps. Imports no JAX."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tekoa.estimator.cli.run_config import FIELDS, FLAG_NAMES, RunConfig, UsageError
from tekoa.extensions import run_record
from tekoa.store.mirror import mirror

# Packages that can change the result of a step.
_ARITHMETIC = ("tekoa", "python", "jax", "jaxlib", "numpy", "optax", "flax", "equinox", "haiku")
# Where and how a command runs, not what it computes.
NOT_REPEATED = {
    *("again", "compile_cache", "coordinator_address", "host_timeout_secs", "json", "mode"),
    *("model_dir", "num_processes", "process_id", "profile_steps", "profiler_port", "progress"),
}
# A replay starts from checkpoints of the run itself.
_NOT_REPLAYED = NOT_REPEATED | {"checkpoint_path", "train_load_step", "dry_run"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run.

    Attributes:
        directory: The directory of the run.
        step: The step at which it began.
        facts: The record of this start, complete.
    """

    directory: pathlib.Path
    step: int
    facts: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.facts["random_seed"]

    @property
    def _copies(self) -> pathlib.Path:
        return self.directory / run_record.SOURCE_DIR

    @property
    def overrides(self) -> dict[str, str]:
        """The settings of the model that were changed on the command line."""
        return self.facts["flags"].get("overrides", {})

    def flags(self) -> dict[str, Any]:
        """Returns the flags that were set, with the model file as it was.

        All others have the defaults of the model file.

        Raises:
            UsageError: If the model file has changed and there is no copy of it.
        """
        recorded: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.facts["flags"].items()
            if name in FLAG_NAMES
        }
        # Earlier versions did not record which flags were set.
        changed = [name for name, value in recorded.items() if value != FIELDS[name].default]
        set_flags = recorded.keys() & set(self.facts.get("given", changed))
        return {
            **{name: recorded[name] for name in set_flags},
            **{name: self._file(recorded.get(name)) for name in ("module_imp", "module_config")},
        }

    def config(self) -> RunConfig:
        """Returns the flags for a replay in the same directory.

        Raises:
            UsageError: If the model file has changed and there is no copy of it.
        """
        flags = {name: value for name, value in self.flags().items() if name not in _NOT_REPLAYED}
        return RunConfig(
            **{**flags, "model_dir": str(self.directory), "progress": False},
            overrides=self.overrides,
            set_flags=frozenset(flags),
        )

    def _file(self, name: str | None) -> str | None:
        """Returns the file to import: the original if it is unchanged, else the recorded copy."""
        if name is None or not name.endswith(".py"):
            return name
        for original, copy in self.facts.get("sources", {}).items():
            path = pathlib.Path(original)
            if copy is None or path.name != pathlib.Path(name).name:
                continue
            if run_record.copy_name(path) == copy:
                return original
            stored = self._copies / copy
            if not stored.is_file():
                raise UsageError(
                    f"{original} has changed since {mirror.shown(self.directory)} was trained, and "
                    f"its copy {stored} is missing. Restore one of the two."
                )
            return str(stored)
        return name

    def differences(self) -> list[str]:
        """Describes what differs between the record and this machine, one line each."""
        lines = []
        for path, copy in self.facts.get("sources", {}).items():
            is_stored = copy is not None and (self._copies / copy).is_file()
            if is_stored and copy != run_record.copy_name(pathlib.Path(path)):
                lines.append(f"{path} has changed or is gone: using the copy of the run, {copy}.")
        recorded, installed = self.facts.get("versions", {}), run_record.versions(_ARITHMETIC)
        lines += [
            f"{name} was {recorded[name]}, is {installed.get(name, 'not installed')}."
            for name in _ARITHMETIC
            if name in recorded and recorded[name] != installed.get(name)
        ]
        return lines

    def machine_differences(self) -> list[str]:
        """Describes how the data and the devices differ, one line each. Imports JAX."""
        from tekoa.data import fingerprint

        lines = []
        recorded = self.facts.get("data", {}).get("--train_pattern")
        pattern = self.facts["flags"].get("train_pattern")
        if recorded and (seen := fingerprint.fingerprint(pattern)) != recorded:
            lines.append(f"The data in {pattern} was {recorded}, is {seen or 'gone'}.")
        devices = [self.facts.get("devices", run_record.devices()), run_record.devices()]
        if devices[0] != devices[1]:
            before, now = (f"{d.get('count')} x {d.get('kind')}" for d in devices)
            lines.append(f"The devices were {before}, are {now}.")
        return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The starts of a run, oldest first."""

    directory: pathlib.Path
    starts: tuple[Start, ...]

    def start_of(self, step: int) -> Start:
        """Returns the start that produced a step; for step 0, the first one.

        A later start replaces all steps after the one at which it began.
        """
        before = [start for start in self.starts if start.step < step]
        return before[-1] if before else self.starts[0]

    def changes_between(self, first: int, last: int) -> list[int]:
        """Returns the steps in between at which another start took over."""
        steps = {start.step for start in self.starts if first < start.step < last}
        return sorted(s for s in steps if self.start_of(s) is not self.start_of(s + 1))


def read_record(directory: str | os.PathLike[str]) -> RunRecord:
    """Reads the record of a run.

    Raises:
        UsageError: If the directory has no record of a run of the command.
        errors.DamagedError: If the record is damaged.
    """
    directory = mirror.fetched(directory, steps="none").absolute()
    path = directory / run_record.RUN_FILE
    if not path.is_file():
        raise UsageError(
            f"{mirror.shown(directory)} has no {run_record.RUN_FILE}: it is not the "
            "directory of a run. Name the directory that --model_dir named in training."
        )
    record = run_record.read(path)
    newest = {name: value for name, value in record.items() if name != "starts"}
    complete: dict[str, Any] = {}
    starts = []
    for changed in record.get("starts") or [newest]:
        complete = {**complete, **changed}
        starts.append(Start(directory=directory, step=complete.get("step", 0), facts=complete))
    if not {"flags", "model", "random_seed"} <= complete.keys():
        raise UsageError(
            f"{path} was not written by `tekoa train`: it does not say how to build the model. "
            "Use tekoa.replay(directory, make_loop) in Python, where make_loop builds the loop."
        )
    return RunRecord(directory=directory, starts=tuple(starts))
