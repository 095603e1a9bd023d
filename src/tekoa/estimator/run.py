"""What is settled before any mode starts: the model, its settings, directory and seed."""

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax

import tekoa
from tekoa.core import hosts
from tekoa.estimator import module as modules
from tekoa.estimator.config import RunConfig, UsageError
from tekoa.estimator.overrides import apply_overrides
from tekoa.estimator.run_files import END_FILE as END_FILE
from tekoa.estimator.run_files import RUN_FILE as RUN_FILE
from tekoa.estimator.run_files import last_step as last_step
from tekoa.estimator.run_files import read_facts as read_facts
from tekoa.store import files, together

# How much a dry run reads.
N_DRY_BATCHES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One call of the command.

    Attributes:
        config: The flags, with the model's own defaults filled in.
        module: The model file.
        settings: The model's config for this run.
        model_dir: The directory of the run, absolute.
    """

    config: RunConfig
    module: types.ModuleType
    settings: Any
    model_dir: pathlib.Path


def open_run(config: RunConfig) -> Run:
    """Imports the model and settles its config.

    Raises:
        UsageError: If the model, its config or the directory is missing or wrong.
    """
    module = modules.load_module(config.module_imp)
    config = config.with_defaults(_defaults(module, config))
    if config.dry_run:
        config = _on_few_batches(config)
    if config.model_dir is None:
        raise UsageError("Where is the run kept? Give --model_dir=DIR.")
    configured = modules.load_module(config.module_config) if config.module_config else module
    if not hasattr(configured, "get_config"):
        raise UsageError(f"{configured.__name__} has no function get_config().")
    return Run(
        config=config,
        module=module,
        settings=apply_overrides(configured.get_config(), config.overrides),
        model_dir=pathlib.Path(config.model_dir).expanduser().absolute(),
    )


def _defaults(module: types.ModuleType, config: RunConfig) -> dict[str, Any]:
    """The model's own flags: all of them on its embedded data, else those it always wants."""
    names_data = any(name.endswith("_pattern") for name in config.given)
    return getattr(module, "ALWAYS" if names_data else "DEFAULTS", {})


def _on_few_batches(config: RunConfig) -> RunConfig:
    changes = {}
    for kind in ("valid", "eval", "pred"):
        n = getattr(config, f"num_{kind}_examples")
        few = N_DRY_BATCHES * getattr(config, f"{kind}_batch_size")
        changes[f"num_{kind}_examples"] = few if n < 0 else min(n, few)
    return dataclasses.replace(config, **changes)


@contextlib.contextmanager
def unless_refused(run: Run) -> Iterator[None]:
    """Takes the directory away again if a start is refused before anything was put there."""
    places = [run.model_dir, *run.model_dir.parents]
    made = places[: next(i for i, path in enumerate(places) if path.exists())]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in made if hosts.current().is_writer else ():
                path.rmdir()
        raise


def choose_seed(run: Run) -> int:
    """Makes the directory and gives the seed: the one given, that of the run so far, or a new one.

    In a dry run the directory is only looked at.

    Raises:
        UsageError: If the directory cannot be made.
    """

    def choose() -> int:
        if run.config.dry_run:
            _check_directory(run.model_dir)
        else:
            _make_directory(run.model_dir)
        seed = run.config.random_seed
        if seed is None:
            seed = read_facts(run.model_dir).get("random_seed")
        return random.SystemRandom().randrange(2**31) if seed is None else seed

    return together.run_on_writer(hosts.current(), "choice of the seed", choose)


def _make_directory(model_dir: pathlib.Path) -> None:
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--model_dir={model_dir} cannot be written: {error}.") from None


def _check_directory(model_dir: pathlib.Path) -> None:
    there = next(path for path in (model_dir, *model_dir.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"--model_dir={model_dir} cannot be written: {there} does not allow it.")


def start_training(
    run: Run,
    seed: int,
    *,
    n_steps: int | None = None,
    scales: Mapping[str, float] | None = None,
) -> None:
    """Writes `run.json` and takes the end mark back.

    To be called once nothing can refuse the start any more: a second trainer, or one with
    another seed, must not change what belongs to the run.

    Args:
        run: The run.
        seed: Its seed.
        n_steps: Where training is to end, if that is known.
        scales: The scales that Amos aims at, by parameter.

    Raises:
        UsageError: If the directory cannot be written.
    """
    if not hosts.current().is_writer:
        return
    try:
        (run.model_dir / END_FILE).unlink(missing_ok=True)
        facts = {**_facts(run, seed), "n_steps": n_steps, "scales": dict(scales or {})}
        text = json.dumps(facts, indent=1, default=str)
        files.replace(run.model_dir / RUN_FILE, text.encode())
    except OSError as error:
        raise UsageError(f"--model_dir={run.model_dir} cannot be written: {error}.") from None


def end_training(run: Run, step: int) -> None:
    """Leaves the mark that tells a waiting evaluator which step was the last."""
    if hosts.current().is_writer:
        files.replace(run.model_dir / END_FILE, json.dumps({"step": step}).encode())


def _facts(run: Run, seed: int) -> dict[str, Any]:
    flags = dataclasses.asdict(run.config)
    given = {name: flags[name] for name in flags if name != "given"}
    settings = run.settings.to_dict() if hasattr(run.settings, "to_dict") else run.settings
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = dataclasses.asdict(settings)
    return {
        "random_seed": seed,
        "command": sys.argv,
        "model": run.module.__name__,
        "settings": settings,
        "flags": given,
        "versions": {
            "tekoa": tekoa.__version__,
            "python": platform.python_version(),
            "jax": jax.__version__,
        },
    }
