"""`tekoa inspect`: what a directory of checkpoints holds, without importing JAX."""

import json
import pathlib

from tekoa.estimator import run_files
from tekoa.estimator.config import UsageError
from tekoa.store import inspecting, names


def show(directory: str) -> int:
    """Prints the steps of a run, or of one checkpoint; gives the exit code.

    Raises:
        UsageError: If there is nothing to show.
    """
    path = pathlib.Path(directory).expanduser()
    if not path.is_dir():
        raise UsageError(f"There is no directory {directory!r}.")
    steps = inspecting.inspect(path, verify="full")
    if not steps:
        raise UsageError(f"{directory} holds no checkpoint.")
    _show_run(path)
    print(f"{'step':>10} {'format':8} {'MB':>9}  state")
    for info in steps:
        state = info.problem or "whole, checksums agree"
        print(f"{info.step:>10} {info.layout:8} {info.n_bytes / 1e6:>9.3f}  {state}")
        for name, value in info.metrics.items():
            print(f"{'':30} {name} {value:.6g}")
    for score in sorted(path.glob("**/score")):
        kept = names.list_steps(score.parent)
        print(f"best of {score.parent.relative_to(path)}: {score.read_text()} at steps {kept}")
    return 0 if not any(info.problem for info in steps) else 1


def _show_run(path: pathlib.Path) -> None:
    facts = run_files.read_facts(path)
    if not facts:
        return
    print(f"model {facts['model']}, seed {facts['random_seed']}, versions {facts['versions']}")
    print(f"settings {json.dumps(facts['settings'])}")
