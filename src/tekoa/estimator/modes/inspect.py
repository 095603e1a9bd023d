"""`tekoa inspect`: lists the checkpoints in a directory, without importing JAX."""

import json
import math
import pathlib

from tekoa.core.messages import array_text
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.run import run_files
from tekoa.store.commit import paths
from tekoa.store.read import inspect


def run_inspect(directory: str, config: RunConfig) -> int:
    """Prints the checkpoints of a run, or the contents of one, and returns the exit code.

    Raises:
        UsageError: If the directory does not exist or contains no checkpoints.
    """
    del config
    path = pathlib.Path(directory).expanduser().absolute()
    if not path.is_dir():
        raise UsageError(f"Directory {directory!r} does not exist.")
    steps = inspect.inspect(path, verify="full")
    if not steps:
        raise UsageError(f"{directory!r} contains no checkpoints.")
    is_step = paths.parse_step(path.name) is not None
    facts = run_files.read_facts(path.parent if is_step else path)
    if facts:
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        print(f"model {facts['model']}, seed {facts['random_seed']}, {versions}")
        print(f"settings {json.dumps(facts['settings'])}")
    print(f"{'step':>10} {'format':8} {'MB':>9}  state")
    for info in steps:
        _print_step(info)
    if is_step:
        _print_arrays(path)
    for score in sorted(path.glob("**/score")):
        best_steps = paths.list_steps(score.parent)
        print(f"best {score.parent.relative_to(path)}: {score.read_text()} (steps {best_steps})")
    return ExitCode.DAMAGED if any(info.problem for info in steps) else ExitCode.SUCCESS


def _print_step(info: inspect.StepInfo) -> None:
    state = info.problem or "valid, checksums match"
    if not info.problem and not (info.path / paths.MANIFEST).exists():
        state = "written by another program, no checksums"
    print(f"{info.step:>10} {info.format:8} {info.n_bytes / 1e6:>9.3f}  {state}")
    for name, value in info.metrics.items():
        print(f"{'':30} {name} {value:.6g}")


def _print_arrays(path: pathlib.Path) -> None:
    """Prints every parameter, and the total size of each item of the checkpoint."""
    try:
        leaves = json.loads((path / paths.INDEX).read_text())["leaves"]
    except (OSError, ValueError, KeyError):
        return  # Written by another program, or damaged.
    sizes: dict[str, list[int]] = {}
    for (item, *name), shape, dtype, *_ in leaves:
        sizes.setdefault(item, []).append(math.prod(shape))
        if item == "model_params":
            print(f"{'':10} {'/'.join(name)} {array_text(dtype, shape)}")
    for item, item_sizes in sizes.items():
        numbers, arrays = _plural(sum(item_sizes), "number"), _plural(len(item_sizes), "array")
        print(f"{'':10} {item}: {numbers} in {arrays}")


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
