"""`tekoa inspect`: what a directory of checkpoints holds, without importing JAX."""

import json
import math
import pathlib

from tekoa.estimator import run_files
from tekoa.estimator.config import UsageError
from tekoa.store import errors, inspecting, names


def show(directory: str) -> int:
    """Prints the steps of a run, or what one checkpoint holds; gives the exit code.

    Raises:
        UsageError: If there is nothing to show.
    """
    path = pathlib.Path(directory).expanduser().absolute()
    if not path.is_dir():
        raise UsageError(f"There is no directory {directory!r}.")
    steps = inspecting.inspect(path, verify="full")
    if not steps:
        raise UsageError(f"{directory} holds no checkpoint.")
    is_one = names.parse_step(path.name) is not None
    _show_run(path.parent if is_one else path)
    print(f"{'step':>10} {'format':8} {'MB':>9}  state")
    for info in steps:
        _show_step(info)
    if is_one:
        _show_arrays(path)
    for score in sorted(path.glob("**/score")):
        kept = names.list_steps(score.parent)
        print(f"best of {score.parent.relative_to(path)}: {score.read_text()} at steps {kept}")
    return errors.DamagedError.exit_code if any(info.problem for info in steps) else 0


def _show_run(path: pathlib.Path) -> None:
    facts = run_files.read_facts(path)
    if not facts:
        return
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"model {facts['model']}, seed {facts['random_seed']}, {versions}")
    print(f"settings {json.dumps(facts['settings'])}")


def _show_step(info: inspecting.StepInfo) -> None:
    state = info.problem or "whole, checksums agree"
    if not info.problem and not (info.path / names.MANIFEST).exists():
        state = "of another program, without checksums"
    print(f"{info.step:>10} {info.layout:8} {info.n_bytes / 1e6:>9.3f}  {state}")
    for name, value in info.metrics.items():
        print(f"{'':30} {name} {value:.6g}")


def _show_arrays(path: pathlib.Path) -> None:
    """Every parameter, and how much there is of all else."""
    try:
        leaves = json.loads((path / names.INDEX).read_text())["leaves"]
    except (OSError, ValueError, KeyError):
        return  # Another program's step, or a damaged one.
    sizes: dict[str, list[int]] = {}
    for (item, *name), shape, dtype, *_ in leaves:
        sizes.setdefault(item, []).append(math.prod(shape))
        if item == "model_params":
            print(f"{'':10} {'/'.join(name)} {dtype}[{','.join(map(str, shape))}]")
    for item, found in sizes.items():
        print(f"{'':10} {item}: {sum(found)} numbers in {len(found)} arrays")
