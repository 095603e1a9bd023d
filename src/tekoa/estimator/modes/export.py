"""`tekoa export`: writes a trained model for other libraries."""

import dataclasses
import pathlib
import sys
from typing import Any

from tekoa.core import files, messages
from tekoa.estimator.cli.run_config import FIELDS, RunConfig, UsageError
from tekoa.estimator.model_file import experiment
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.replay.record import Start, read_record
from tekoa.estimator.run import layout, run_files
from tekoa.estimator.run import run as runs
from tekoa.exchange import export, trained
from tekoa.exchange.export import PROGRAMS, SUFFIXES, Format
from tekoa.store.formats.step import find, is_step
from tekoa.store.mirror import mirror

# A program runs on one device, and the trained weights are in the checkpoint.
_TRAINING_FLAGS = (*layout.FLAGS, "lora_base")


def run_export(directory: str, config: RunConfig) -> int:
    """Writes the newest checkpoint of a run in the format of `--to` and returns the exit code.

    Args:
        directory: The directory of a run, of its checkpoints, or of a single one.
        config: The flags. `out` is the file to write; None writes NAME.FORMAT to the working
            directory, where NAME is that of the directory of the run.

    Raises:
        UsageError: If there is no such directory, or `--to` is missing.
    """
    path = mirror.fetched(directory).absolute()
    if not path.is_dir():
        raise UsageError(f"Directory {directory!r} does not exist.")
    start = _find_start(path)
    target = _target(config, path if start is None else start.directory)
    weights = trained.read(path)
    try:
        if target.format in PROGRAMS:
            run = _open_run(start, target.format)
            step_dir = path if is_step(path) else find(path, weights.step)
            infer, inputs = program_of(run, "predict").inference(str(step_dir))
            export.write_program(
                target.path,
                target.format,
                weights,
                infer,
                inputs,
                batch_size=config.export_batch_size,
            )
        else:
            names = config.names or _weight_rules(start, target.format)
            export.write_weights(target.path, target.format, weights, names)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    size = f" ({target.path.stat().st_size / 1e3:.0f} kB)" if target.path.is_file() else ""
    print(messages.printable(f"Wrote step {weights.step} to {target.path}{size}."))
    return 0


@dataclasses.dataclass(frozen=True)
class _Target:
    path: pathlib.Path
    format: Format


def _target(config: RunConfig, directory: pathlib.Path) -> _Target:
    suffixes: dict[str | None, str] = {name: suffix for suffix, name in SUFFIXES.items()}
    if config.out is None and config.to not in suffixes:
        raise UsageError(f"export needs a format: --to={'|'.join(SUFFIXES.values())}.")
    path = files.local_path(config.out or directory.name + suffixes[config.to])
    try:
        return _Target(path, export.check_format(path, config.to))
    except ValueError as error:
        raise UsageError(str(error).replace("or to=", "or --to")) from None


def _find_start(path: pathlib.Path) -> Start | None:
    """Returns the record of the run to which a checkpoint belongs, or None if there is none."""
    # A best checkpoint is three levels below the directory of its run.
    for candidate in (path, *path.parents[:4]):
        if run_files.read_facts(candidate).get("flags"):
            return read_record(candidate).starts[-1]
    return None


def _open_run(start: Start | None, to: str) -> runs.Run:
    """Opens the model with the settings with which it was trained."""
    if start is None:
        raise UsageError(
            f"--to={to} needs the model, but there is no record of a model file. In Python, use "
            "tekoa.export(directory, out, model=..., inputs=...)."
        )
    config = start.config()
    defaults = {name: FIELDS[name].default for name in _TRAINING_FLAGS}
    return runs.open_run(
        dataclasses.replace(config, **defaults, set_flags=config.set_flags - {*_TRAINING_FLAGS})
    )


def _weight_rules(start: Start | None, to: str) -> Any:
    """Returns the rules of the model file for the names of its weights, or None."""
    if start is None or to != "safetensors":
        return None
    try:
        module = experiment.load_module(start.flags()["module_imp"])
    except UsageError as error:
        print(f"Weights are named without the rules of the model. {error}", file=sys.stderr)
        return None
    return getattr(module, "WEIGHT_RULES", None)
