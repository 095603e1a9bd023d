"""A run: its model, settings, directory and seed, all known before a mode starts."""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tekoa import hosts
from tekoa.core import files
from tekoa.data import fingerprint, remote
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.cli.overrides import apply_overrides
from tekoa.estimator.model_file import experiment as modules
from tekoa.estimator.run.run_files import RUN_FILE, read_facts
from tekoa.exchange import weights_file
from tekoa.extensions import run_record
from tekoa.store.commit import durable, paths, together
from tekoa.store.mirror import mirror

_FLAGS_OF_A_START = {
    *("again", "checkpoint_path", "compile_cache", "coordinator_address", "host_timeout_secs"),
    *("json", "mode", "model_dir", "module_imp", "num_processes", "overrides", "process_id"),
    *("profile_steps", "profiler_port", "progress", "random_seed", "track", "track_project"),
    "train_load_step",
}
# Flags that change the parameters of the model, so that evaluation needs them too.
_MODEL_FLAGS = ("lora_rank", "lora_where", "lora_alpha")
# Batches that a dry run reads.
N_DRY_BATCHES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One call of the command.

    Attributes:
        config: The flags, with the defaults of the model filled in.
        module: The model file.
        settings: The config of the model for this run.
        model_dir: The directory of the run, as an absolute path.
        classes: The names of the classes with which the run was trained, if they are known.
    """

    config: RunConfig
    module: types.ModuleType
    settings: Any
    model_dir: pathlib.Path
    classes: Sequence[str] | None = None


def open_run(
    config: RunConfig, directory: pathlib.Path | None = None, *, as_trained: bool = False
) -> Run:
    """Imports the model and creates its config.

    Args:
        config: The flags.
        directory: The local copy of `--model_dir` to write to, if that is in an object store.
        as_trained: Whether settings that the flags do not set are those of the run to evaluate.

    Raises:
        UsageError: If the model, its config or the directory is missing or wrong.
    """
    if config.compat is not None:
        importlib.import_module(f"tekoa.compat.{config.compat}").install()
    module = modules.load_module(config.module_imp)
    config = config.with_defaults(_defaults(module, config))
    if config.dry_run:
        config = _on_few_batches(config)
    config = dataclasses.replace(
        config,
        model_dir=config.model_dir or str(pathlib.Path("runs", module.__name__.rpartition(".")[2])),
    )
    model_dir = directory or mirror.fetched(config.model_dir or "", steps="none").absolute()
    config = dataclasses.replace(config, checkpoint_path=_local(config.checkpoint_path))
    trained = _trained_facts(config, module, model_dir) if as_trained else {}
    if trained:
        config = _with_trained_settings(config, trained)
    config_module = modules.load_module(config.module_config) if config.module_config else module
    if not hasattr(config_module, "get_config"):
        raise UsageError(f"{config_module.__name__} has no function get_config().")
    return Run(
        config=config,
        module=module,
        settings=apply_overrides(config_module.get_config(), config.overrides),
        model_dir=model_dir,
        classes=trained.get("classes"),
    )


def _local(checkpoint_path: str | None) -> str | None:
    """Returns the local copy of a checkpoint or of a file of weights in an object store."""
    if not mirror.is_url(checkpoint_path):
        return checkpoint_path
    assert checkpoint_path is not None
    if weights_file.is_weights_file(checkpoint_path):
        return remote.fetch(checkpoint_path)[0]
    return str(mirror.fetched(checkpoint_path).absolute())


def _trained_facts(
    config: RunConfig, module: types.ModuleType, model_dir: pathlib.Path
) -> dict[str, Any]:
    """Returns the record of the run to evaluate; empty if it is of another model."""
    path = config.checkpoint_path
    start = model_dir if path is None else files.local_path(path).absolute()
    if start.is_file():
        start = start.parent
    # A best checkpoint is three levels below the directory of its run.
    candidates = [start, *start.parents[:4]] if path is not None else [start]
    facts = next(filter(None, map(read_facts, candidates)), {})
    return facts if facts.get("model") == module.__name__ else {}


def _with_trained_settings(config: RunConfig, facts: Mapping[str, Any]) -> RunConfig:
    """Adds the settings with which the run was trained, and prints them."""
    flags = facts.get("flags", {})
    trained = {
        name: text
        for name, text in flags.get("overrides", {}).items()
        # The trained weights are in the checkpoint.
        if name not in config.overrides and name != "lora.base"
    }
    model_flags = {
        name: flags[name]
        for name in _MODEL_FLAGS
        if name not in config.set_flags and flags.get(name) is not None
    }
    if (trained or model_flags) and hosts.current().is_writer:
        text = ", ".join(f"{name}={value}" for name, value in {**trained, **model_flags}.items())
        print(f"Using the settings of the run: {text}.", file=sys.stderr, flush=True)
    return dataclasses.replace(
        config,
        module_config=config.module_config or flags.get("module_config"),
        overrides={**trained, **config.overrides},
        **model_flags,
    )


def subdirectory(run: Run, name: str) -> pathlib.Path:
    """Returns a directory of the run to write to; it need not exist.

    Raises:
        UsageError: If there is something else of this name. Links are not followed, because they
            may lead out of the run.
    """
    path = run.model_dir / name
    is_link = bool(name) and path.is_symlink()
    if is_link or (path.exists() and not path.is_dir()):
        kind = "a link" if is_link else "not a directory"
        raise UsageError(f"{path} is {kind}. The run needs a directory of this name: move it away.")
    return path


def _defaults(module: types.ModuleType, config: RunConfig) -> dict[str, Any]:
    """Returns the model's default flags; those about its own data only if that data is used."""
    names_data = any(name.endswith("_pattern") for name in config.set_flags)
    return getattr(module, "ALWAYS" if names_data else "DEFAULTS", {})


def _on_few_batches(config: RunConfig) -> RunConfig:
    changes = {}
    for kind in ("valid", "eval", "pred"):
        n = getattr(config, f"num_{kind}_examples")
        limit = N_DRY_BATCHES * getattr(config, f"{kind}_batch_size")
        changes[f"num_{kind}_examples"] = limit if n < 0 else min(n, limit)
    return dataclasses.replace(config, **changes)


@contextlib.contextmanager
def remove_new_dir_on_error(run: Run) -> Iterator[None]:
    """Removes the new directory if the start fails before anything is written to it.

    After a mistake in the flags, which a first validation may reveal, the records of the start are
    removed too, unless the directory contained something or a step was saved.
    """
    path_and_parents = [run.model_dir, *run.model_dir.parents]
    n_new = next(i for i, path in enumerate(path_and_parents) if path.exists())
    was_empty = n_new > 0 or (run.model_dir.is_dir() and not os.listdir(run.model_dir))
    try:
        yield
    except BaseException as error:
        if hosts.current().is_writer:
            is_mistake = isinstance(error, UsageError) and was_empty
            if is_mistake and not paths.list_steps(run.model_dir):
                for name in (RUN_FILE, run_record.SOURCE_DIR, "train"):
                    durable.remove(run.model_dir / name)
            with contextlib.suppress(OSError):
                for path in path_and_parents[:n_new]:
                    path.rmdir()
        raise


def choose_seed(run: Run) -> int:
    """Creates the directory and returns the seed: from the flag, from `run.json`, or a new one.

    A dry run only checks the directory.

    Raises:
        UsageError: If the directory cannot be created.
    """

    def choose() -> int:
        with _writing(run.model_dir):
            if run.config.dry_run:
                _check_directory(run.model_dir)
            else:
                run.model_dir.mkdir(parents=True, exist_ok=True)
        seed = run.config.random_seed
        if seed is None:
            seed = read_facts(run.model_dir).get("random_seed")
        return random.SystemRandom().randrange(2**31) if seed is None else seed

    return together.run_on_writer(hosts.current(), "choice of the seed", choose)


@contextlib.contextmanager
def _writing(model_dir: pathlib.Path) -> Iterator[None]:
    """Turns an `OSError` into a `UsageError` that names the flag."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--model_dir={model_dir} cannot be written: {error}.") from None


def _check_directory(model_dir: pathlib.Path) -> None:
    path = next(path for path in (model_dir, *model_dir.parents) if path.exists())
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise OSError(f"{path} is not a writable directory")


def start_training(
    run: Run,
    seed: int,
    *,
    step: int = 0,
    n_steps: int | None = None,
    scales: Mapping[str, float] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> list[str]:
    """Adds this start to `run.json` and removes the end mark.

    Call it only when the start can no longer fail: a second trainer, or one with another seed,
    must not change the files of the run.

    Args:
        run: The run.
        seed: Its seed.
        step: The step at which it starts.
        n_steps: The last step of the training, if known.
        scales: The scales of Amos or sphere, by parameter.
        optimizer: What was chosen, if the optimizer has a name.
        classes: The names of the classes, if the data names them.

    Returns:
        What has changed since the previous start, one line per setting.

    Raises:
        UsageError: If the directory cannot be written.
    """
    if not hosts.current().is_writer:
        return []
    facts = {**_facts(run, seed), "n_steps": n_steps, "scales": dict(scales or {})}
    if optimizer:
        facts["optimizer"] = {k: v for k, v in optimizer.items() if k != "eta"}
    if classes:
        facts["classes"] = list(classes)
    with _writing(run.model_dir):
        run_record.remove_end(run.model_dir)
        before, after = run_record.write_start(
            run.model_dir, facts, step=step, sources=_sources(run)
        )
    return run_record.changes(_lasting(before), _lasting(after)) if before else []


def end_training(run: Run, step: int) -> None:
    """Writes the end mark, which holds the last step for a waiting evaluator."""
    if hosts.current().is_writer:
        run_record.write_end(run.model_dir, step)


def _facts(run: Run, seed: int) -> dict[str, Any]:
    flags = dataclasses.asdict(run.config)
    if run.config.checkpoint_path is not None:
        flags["checkpoint_path"] = mirror.shown(run.config.checkpoint_path)
    digest = fingerprint.fingerprint(run.config.train_pattern)
    settings = run.settings.to_dict() if hasattr(run.settings, "to_dict") else run.settings
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = dataclasses.asdict(settings)
    return {
        "random_seed": seed,
        "model": run.module.__name__,
        "devices": run_record.devices(),
        "data": {"--train_pattern": digest} if digest else {},
        "settings": settings,
        "flags": {name: value for name, value in flags.items() if name != "set_flags"},
        "given": sorted(run.config.set_flags),
    }


def code_digests(run: Run) -> dict[str, str | None]:
    """Returns the copies of the model's files, whose names contain their digests."""
    sources = map(pathlib.Path, _sources(run))
    return {path.name: run_record.copy_name(path) for path in sources}


def _sources(run: Run) -> list[str]:
    """Returns the files that define the model and its config."""
    files = [getattr(run.module, "__file__", None), run.config.module_config]
    return [file for file in files if file is not None and pathlib.Path(file).is_file()]


def _lasting(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record without the flags that concern one start only."""
    flags = record.get("flags", {})
    return {**record, "flags": {n: v for n, v in flags.items() if n not in _FLAGS_OF_A_START}}
