"""`tekoa inspect`: lists the checkpoints in a directory, without importing JAX."""

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from tekoa.core.messages import array_text, printable
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.run import run_files
from tekoa.store import errors
from tekoa.store.commit import durable, paths, score
from tekoa.store.formats import checked
from tekoa.store.mirror import mirror
from tekoa.store.read import inspect

_PACKAGES = ("tekoa", "python", "jax", "flax", "optax", "numpy")


def run_inspect(directory: str, config: RunConfig) -> int:
    """Prints the checkpoints of a run, or the contents of one, and returns the exit code.

    Raises:
        UsageError: If the directory does not exist or contains no checkpoints.
    """
    del config
    path = mirror.fetched(directory, steps="all").absolute()
    if not path.is_dir():
        raise UsageError(f"Directory {directory!r} does not exist.")
    steps = inspect.inspect(path, verify="full")
    if not steps:
        raise UsageError(f"{directory!r} contains no checkpoints.")
    is_step = paths.parse_step(path.name) is not None
    is_damaged = any(info.problem for info in steps)
    try:
        _print_run(path.parent if is_step else path)
    except (errors.DamagedError, PermissionError) as error:
        is_damaged = True
        print(printable(error))
    print(f"{'step':>10} {'format':8} {'MB':>9}  state")
    for info in steps:
        _print_step(info)
    if is_step:
        _print_arrays(path)
    for folder in _best_folders(path):
        try:
            value = score.read(folder / score.NAME)
        except (errors.DamagedError, PermissionError) as error:
            is_damaged = True
            print(printable(error))
            continue
        place = printable(folder.relative_to(path))
        print(f"best {place}: {value} (steps {paths.list_steps(folder)})")
    return ExitCode.DAMAGED if is_damaged else ExitCode.SUCCESS


def _print_run(model_dir: pathlib.Path) -> None:
    """Prints the model, seed, versions and settings of the run, if they are known."""
    facts = run_files.read_facts(model_dir)
    if facts:
        versions = facts.get("versions", {})
        shown = (f"{name} {versions[name]}" for name in _PACKAGES if name in versions)
        about = (f"model {facts.get('model')}", f"seed {facts.get('random_seed')}", *shown)
        print(printable(", ".join(about)))
        print(f"settings {json.dumps(facts.get('settings'))}")


def _best_folders(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the directories below that contain a score; links are not followed."""
    for name, is_dir in durable.walk(path):
        if not is_dir and pathlib.PurePath(name).name == score.NAME:
            yield (path / name).parent


def _print_step(info: inspect.StepInfo) -> None:
    state = info.problem or "valid, checksums match"
    if not info.problem and not (info.path / paths.MANIFEST).exists():
        state = "written by another program, no checksums"
    print(f"{info.step:>10} {printable(info.format):8} {info.n_bytes / 1e6:>9.3f}  ", end="")
    print(printable(state))
    for name, value in info.metrics.items():
        print(f"{'':30} {printable(name)} {value:.6g}")
    for name, count in _examples_per_source(info.meta).items():
        print(f"{'':30} {count} examples of {printable(name)}")


def _examples_per_source(meta: dict[str, Any]) -> dict[str, int]:
    """Returns the examples of each source of a mixture, from the data position of a step."""
    state = meta.get("data_state")
    if isinstance(state, dict) and isinstance(state.get("batches"), dict):
        state = state["batches"]
    counts = state.get("examples_per_source") if isinstance(state, dict) else None
    if not isinstance(counts, dict):
        return {}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def _print_arrays(path: pathlib.Path) -> None:
    """Prints every parameter, and the total size of each item of the checkpoint."""
    try:
        leaves = checked.read_index(path)["leaves"]
    except errors.DamagedError:
        return  # Reported with the step; T5X's own steps have no index.
    sizes: dict[str, list[int]] = {}
    for leaf in leaves:
        (item, *name), shape = leaf["name"], leaf["shape"]
        sizes.setdefault(item, []).append(math.prod(shape))
        if item == "model_params":
            text = array_text(leaf["dtype"], shape)
            print(f"{'':10} {printable('/'.join(name))} {printable(text)}")
    for item, item_sizes in sizes.items():
        numbers, arrays = _plural(sum(item_sizes), "number"), _plural(len(item_sizes), "array")
        print(f"{'':10} {printable(item)}: {numbers} in {arrays}")


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
