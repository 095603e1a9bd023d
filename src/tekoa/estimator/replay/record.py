"""What `run.json` says about a run: which settings produced which steps."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tekoa.core import files
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.run import run as runs
from tekoa.extensions import run_record

# Packages that can change the result of a step.
_ARITHMETIC = ("tekoa", "python", "jax", "jaxlib", "numpy", "optax", "flax", "equinox", "haiku")
# Flags that say where and how a command runs, not what it computes.
_NOT_REPLAYED = {
    "checkpoint_path": None,
    "train_load_step": False,
    "dry_run": False,
    "profile_steps": None,
    "profiler_port": None,
    "coordinator_address": None,
    "num_processes": None,
    "process_id": None,
}


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

    def config(self) -> RunConfig:
        """Returns the flags of this start, with the model file as it was.

        Raises:
            UsageError: If the model file has changed and there is no copy of it.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
        recorded = {n: v for n, v in self.facts["flags"].items() if n in defaults}
        # Earlier versions did not record which flags were set.
        changed = [n for n, v in recorded.items() if v != defaults[n]]
        given = frozenset(self.facts.get("given", changed)) & defaults.keys()
        values: dict[str, Any] = {
            **{n: tuple(v) if isinstance(v, list) else v for n, v in recorded.items()},
            **_NOT_REPLAYED,
            "model_dir": str(self.directory),
            "module_imp": self._file(recorded["module_imp"]),
            "module_config": self._file(recorded.get("module_config")),
        }
        return RunConfig(**values, given=given - _NOT_REPLAYED.keys())

    def _file(self, name: str | None) -> str | None:
        """Returns the file to import: the original if it is unchanged, else the recorded copy."""
        if name is None or not name.endswith(".py"):
            return name
        copy = self._copy(name)
        if copy is None or run_record.copy_name(pathlib.Path(name)) == copy.name:
            return name
        if not copy.is_file():
            raise UsageError(
                f"{name} has changed since the run was trained, and its copy {copy} is missing. "
                "Restore one of the two to replay the run."
            )
        return str(copy)

    def _copy(self, name: str) -> pathlib.Path | None:
        """Returns the recorded copy of a source file."""
        for path, copy in self.facts.get("sources", {}).items():
            if copy is not None and pathlib.Path(path).name == pathlib.Path(name).name:
                return self.directory / run_record.SOURCE_DIR / copy
        return None

    def differences(self) -> list[str]:
        """Describes what differs between the record and this machine, one line each."""
        lines = []
        for path, copy in self.facts.get("sources", {}).items():
            if copy is not None and copy != run_record.copy_name(pathlib.Path(path)):
                lines.append(f"{path} has changed or is gone; the copy of the run is {copy}.")
        recorded, installed = self.facts.get("versions", {}), run_record.versions()
        lines += [
            f"{name} was {recorded[name]}, is {installed.get(name, 'not installed')}."
            for name in _ARITHMETIC
            if name in recorded and recorded[name] != installed.get(name)
        ]
        devices = self.facts.get("devices")
        if devices is not None and devices != runs.device_facts():
            lines.append(f"The devices were {devices}, are {runs.device_facts()}.")
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
    directory = files.local_path(directory).absolute()
    path = directory / run_record.RUN_FILE
    if not path.is_file():
        raise UsageError(
            f"{directory} has no {run_record.RUN_FILE}: it is not the directory of a run."
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
            "Use tekoa.replay(directory, make_loop) in Python."
        )
    return RunRecord(directory=directory, starts=tuple(starts))
