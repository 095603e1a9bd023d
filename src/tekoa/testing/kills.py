"""Kills training processes and compares their results with an uninterrupted run.

`check_kills` is the part of `tekoa.testing.check_resume` that needs processes. Each of them runs
`tekoa.testing.kill_worker`, which imports the user's function by name and records a digest of every
leaf at every checkpoint: a difference is found at the step and leaf where it first appears.
"""

import contextlib
import dataclasses
import importlib.machinery
import inspect
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tekoa.hosts import signals
from tekoa.store.commit import paths
from tekoa.store.read import load
from tekoa.testing import compare


@dataclasses.dataclass(frozen=True, kw_only=True)
class KillReport:
    """The interruptions of a run that computed the same bits as an uninterrupted one.

    Attributes:
        n_killed: Number of times it was killed by SIGKILL.
        n_stopped: Number of times it was stopped by another signal, without losing a step.
        resumed_from: The step from which each start resumed.
        max_steps_lost: The largest number of steps repeated after a SIGKILL.
    """

    n_killed: int
    n_stopped: int
    resumed_from: list[int]
    max_steps_lost: int


def import_path(make_loop: Any) -> str | None:
    """Returns the name by which a new process can import a function, or None.

    Returns:
        'module:function', or 'file.py:function' if the module is not importable by name.

    >>> import_path('my_module:make_loop'), import_path(lambda reader: None)
    ('my_module:make_loop', None)
    """
    if isinstance(make_loop, str):
        return make_loop
    name, module = getattr(make_loop, "__qualname__", "<"), getattr(make_loop, "__module__", None)
    if "<" in name or module is None or getattr(sys.modules.get(module), name, None) is None:
        return None
    try:
        file = inspect.getsourcefile(make_loop)
    except TypeError:
        return None
    if file is None or not os.path.isfile(file):
        return None
    return f"{module if _is_importable(module, file) else os.path.abspath(file)}:{name}"


def _is_importable(module: str, file: str) -> bool:
    """Returns whether a new process finds this file under the module's name."""
    spec, path = None, sys.path
    for name in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations or []
    return spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file)


def check_kills(
    make_loop: Callable[..., Any] | str,
    *,
    n_kills: int = 4,
    n_steps: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    seed: int = 0,
    kinds: Sequence[signal.Signals] = (signal.SIGKILL, signal.SIGTERM),
    limit_seconds: float = 600.0,
) -> KillReport:
    """Kills a training run repeatedly, and compares it with an uninterrupted one.

    After a SIGTERM the run must have saved its last step and exited with code 75.

    Args:
        make_loop: As for `tekoa.testing.check_resume`: a function at the top level of a module or
            file, or its name, 'module:function' or 'file.py:function'.
        n_kills: Number of times the run is killed.
        n_steps: Total number of steps; the loop's own by default.
        directory: Where both runs are stored; a temporary directory by default.
        seed: Determines the moments of the kills.
        kinds: The signals, used in turn.
        limit_seconds: Time limit for one process.

    Raises:
        AssertionError: If a bit differs (names the step and the leaf), or a step was lost.
        RuntimeError: If a process fails by itself or takes too long.
        ValueError: If the function cannot be imported by a new process.
    """
    path = import_path(make_loop)
    if path is None:
        raise ValueError(
            f"{make_loop!r} cannot be imported by a new process. Put it at the top level of a "
            "module or file, or pass its name: check_resume('my_module:make_loop')."
        )
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        reference = _Run(
            directory=pathlib.Path(directory) / "undisturbed",
            path=path,
            n_steps=n_steps,
            limit_seconds=limit_seconds,
        )
        reference.train()
        killed = dataclasses.replace(reference, directory=pathlib.Path(directory) / "killed")
        kinds = [kinds[i % len(kinds)] for i in range(n_kills)]
        return _kill_and_compare(killed, reference, kinds, random.Random(seed))


def _kill_and_compare(
    run: "_Run", reference: "_Run", kinds: list[signal.Signals], rng: random.Random
) -> KillReport:
    expected = reference.digests()
    last = max(expected)
    resumed_from, n_lost = [], 0
    for i, kind in enumerate(kinds):
        start, n_before = run.newest(), len(run.steps_run())
        # Spread over the remaining steps, so that even the last kill interrupts some.
        aim = rng.uniform(start, start + (last - start) / (len(kinds) - i))
        run.train(kind, aim=int(aim), delay_fraction=rng.random())
        resumed_from.append(start)
        # An earlier process may have reached a later step before it was killed.
        reached = max(start, *run.steps_run()[n_before:], 0)
        if kind != signal.SIGKILL and reached > run.newest():
            raise AssertionError(
                f"Stopped by {kind.name} at step {reached}, but step {run.newest()} is the last "
                "one saved."
            )
        n_lost = max(n_lost, reached - run.newest())
        _compare(expected, run.digests(), start)
    resumed_from.append(run.newest())
    run.train()
    _compare(expected, run.digests(), resumed_from[-1])
    _compare_stored(reference, run)
    return KillReport(
        n_killed=kinds.count(signal.SIGKILL),
        n_stopped=len(kinds) - kinds.count(signal.SIGKILL),
        resumed_from=resumed_from,
        max_steps_lost=n_lost,
    )


def _compare(expected: dict[int, Any], actual: dict[int, Any], start: int) -> None:
    for step in sorted(actual.keys() & expected.keys()):
        differing = [
            name for name, digest in expected[step].items() if actual[step].get(name) != digest
        ]
        if differing:
            raise AssertionError(
                f"The run that was killed and resumed from step {start} differs at step {step}. "
                f"Leaf {differing[0]!r} differs from the uninterrupted run"
                + (f", and {len(differing) - 1} more: {differing[1:9]}." if differing[1:] else ".")
            )


def _compare_stored(reference: "_Run", run: "_Run") -> None:
    if reference.newest() != run.newest():
        raise AssertionError(
            f"The run ended at step {run.newest()} instead of {reference.newest()}."
        )
    compare.assert_trees_equal(load.load(reference.directory), load.load(run.directory))
    leftovers = [p.name for p in run.directory.iterdir() if "tmp" in p.name or "trash" in p.name]
    if leftovers:
        raise AssertionError(f"{run.directory} contains leftovers of killed runs: {leftovers}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A directory, and the processes that train in it one after another."""

    directory: pathlib.Path
    path: str
    n_steps: int | None
    limit_seconds: float

    def __post_init__(self):
        self.directory.mkdir(parents=True)

    def newest(self) -> int:
        return max(paths.list_steps(self.directory), default=0)

    def steps_run(self) -> list[int]:
        """Returns the steps of all checkpoints of all processes, in order."""
        return [line["step"] for line in _lines(self.directory / "notes")]

    def digests(self) -> dict[int, dict[str, str]]:
        """Returns the digests by step; those of a step that ran twice must be equal."""
        by_step: dict[int, dict[str, str]] = {}
        for line in _lines(self.directory / "notes"):
            step = line["step"]
            if step in by_step:
                _compare({step: by_step[step]}, {step: line["digests"]}, line["start"])
            by_step[step] = line["digests"]
        return by_step

    def train(self, kind: int = 0, *, aim: int = 0, delay_fraction: float = 0.0) -> None:
        """Starts a process and waits until it ends, by the signal if there is one."""
        plan = {"n_steps": self.n_steps, "signal": int(kind), "aim": aim, "delay": delay_fraction}
        command = [sys.executable, "-m", "tekoa.testing.kill_worker", self.path, self.directory]
        try:
            process = subprocess.run(
                [*map(str, command), json.dumps(plan)],
                env=_environment(self.directory.parent / "programs"),
                capture_output=True,
                text=True,
                check=False,
                timeout=self.limit_seconds,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"A run took more than {self.limit_seconds} seconds.") from None
        expected = -kind if kind in (0, signal.SIGKILL) else signals.EXIT_STOPPED
        if process.returncode != expected:
            raise RuntimeError(
                f"A run of {self.path} ended with code {process.returncode} instead of "
                f"{expected}:\n{process.stderr[-4000:]}"
            )


def _environment(programs: pathlib.Path) -> dict[str, str]:
    """Returns this process's environment with a shared compilation cache."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # Killed while writing it.
                yield json.loads(line)
