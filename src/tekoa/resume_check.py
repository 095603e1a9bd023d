"""Kills real processes that train, and compares what comes out with an undisturbed run.

`check_kills` is the part of `tekoa.testing.check_resume` that needs processes. Each is one
of `tekoa.resume_run`, which imports the user's function by name and notes down a digest of
every leaf at every checkpoint: a difference is found at the step and leaf where it first
appears.
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

from tekoa import testing
from tekoa.store import loading, names, signals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kills:
    """What was done to a run that then gave the bits of an undisturbed one.

    Attributes:
        n_killed: How often it was killed by SIGKILL.
        n_stopped: How often it was stopped by another signal, without losing a step.
        resumed_from: The step from which each start went on.
        max_steps_lost: The most steps that had to be run again after a SIGKILL.
    """

    n_killed: int
    n_stopped: int
    resumed_from: list[int]
    max_steps_lost: int


def import_path(make_loop: Any) -> str | None:
    """Gives the name by which a new process can import a function, or None if it cannot.

    Returns:
        'module:function', or 'file.py:function' where the module is no importable one.

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
    """Whether a new process finds this file under the module's name."""
    found, path = None, sys.path
    for part in module.split("."):
        found = importlib.machinery.PathFinder.find_spec(part, path)
        if found is None:
            return False
        path = found.submodule_search_locations or []
    return found is not None and found.origin is not None and os.path.samefile(found.origin, file)


def check_kills(
    make_loop: Callable[..., Any] | str,
    *,
    n_kills: int = 4,
    n_steps: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    seed: int = 0,
    kinds: Sequence[signal.Signals] = (signal.SIGKILL, signal.SIGTERM),
    limit_seconds: float = 600.0,
) -> Kills:
    """Kills a training over and over, and compares it with one that nobody disturbed.

    After a SIGTERM the run must have saved its last step and ended with code 75.

    Args:
        make_loop: As `tekoa.testing.check_resume` takes it: a function at the top level of
            a module or file, or its name, 'module:function' or 'file.py:function'.
        n_kills: How often.
        n_steps: Steps in total; those of the loop by default.
        directory: Where both runs are kept; a temporary one by default.
        seed: Chooses the moments.
        kinds: The signals, taken in turn.
        limit_seconds: How long one process may take.

    Raises:
        AssertionError: If a bit differs, naming step and leaf; or if a step was lost.
        RuntimeError: If a process fails by itself or takes too long.
        ValueError: If the function cannot be imported by a new process.
    """
    path = import_path(make_loop)
    if path is None:
        raise ValueError(
            f"{make_loop!r} cannot be imported by a new process. Put it at the top level of a "
            "module or file, or give its name: check_resume('my_module:make_loop')."
        )
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        worker = _Worker(path, n_steps, limit_seconds)
        reference = _Run(pathlib.Path(directory) / "undisturbed", worker)
        reference.go_on()
        disturbed = _Run(pathlib.Path(directory) / "killed", worker)
        kinds = [kinds[i % len(kinds)] for i in range(n_kills)]
        return _disturb(disturbed, reference, kinds, random.Random(seed))


def _disturb(
    run: "_Run", reference: "_Run", kinds: list[signal.Signals], chance: random.Random
) -> Kills:
    expected = reference.notes()
    last = max(expected)
    resumed_from, lost = [], 0
    for i, kind in enumerate(kinds):
        start, n_before = run.newest(), len(run.steps_noted())
        # Spread over what is left, so that the last kill too finds something to disturb.
        aim = chance.uniform(start, start + (last - start) / (len(kinds) - i))
        run.go_on(kind, aim=int(aim), chance=chance.random())
        resumed_from.append(start)
        # An earlier process may have gone further before it was killed.
        reached = max(start, *run.steps_noted()[n_before:], 0)
        if kind != signal.SIGKILL and reached > run.newest():
            raise AssertionError(
                f"Stopped by {kind.name} at step {reached}, but step {run.newest()} is the last "
                "one saved."
            )
        lost = max(lost, reached - run.newest())
        _compare(expected, run.notes(), start)
    resumed_from.append(run.newest())
    run.go_on()
    _compare(expected, run.notes(), resumed_from[-1])
    _compare_stored(reference, run)
    return Kills(
        n_killed=kinds.count(signal.SIGKILL),
        n_stopped=len(kinds) - kinds.count(signal.SIGKILL),
        resumed_from=resumed_from,
        max_steps_lost=lost,
    )


def _compare(expected: dict[int, Any], found: dict[int, Any], start: int) -> None:
    for step in sorted(found.keys() & expected.keys()):
        pair = expected[step], found[step]
        differing = [name for name in pair[0] if pair[0][name] != pair[1].get(name)]
        if differing:
            raise AssertionError(
                f"The run that was killed and resumed from step {start} differs at step {step}. "
                f"Leaf {differing[0]!r} is not what an undisturbed run has"
                + (f", and {len(differing) - 1} more: {differing[1:9]}." if differing[1:] else ".")
            )


def _compare_stored(reference: "_Run", run: "_Run") -> None:
    if reference.newest() != run.newest():
        raise AssertionError(f"It ended at step {run.newest()} instead of {reference.newest()}.")
    testing.assert_trees_equal(loading.load(reference.directory), loading.load(run.directory))
    odd = [p.name for p in run.directory.iterdir() if "tmp" in p.name or "trash" in p.name]
    if odd:
        raise AssertionError(f"{run.directory} holds what killed runs left behind: {odd}.")


@dataclasses.dataclass(frozen=True)
class _Worker:
    path: str
    n_steps: int | None
    limit_seconds: float


class _Run:
    """A directory, and the processes that train in it one after the other."""

    def __init__(self, directory: pathlib.Path, worker: _Worker):
        self.directory, self._worker = directory, worker
        directory.mkdir(parents=True)

    def newest(self) -> int:
        return max(names.list_steps(self.directory), default=0)

    def steps_noted(self) -> list[int]:
        """The steps of all checkpoints of all processes, in the order they came."""
        return [line["step"] for line in _lines(self.directory / "notes")]

    def notes(self) -> dict[int, dict[str, str]]:
        """What was noted down by step; a step run twice must have given the same."""
        found: dict[int, dict[str, str]] = {}
        for line in _lines(self.directory / "notes"):
            step, note = line["step"], line["digests"]
            if step in found:
                _compare({step: found[step]}, {step: note}, line["start"])
            found[step] = note
        return found

    def go_on(self, kind: int = 0, *, aim: int = 0, chance: float = 0.0) -> None:
        """Starts a process and waits for its end, by the signal if there is one."""
        worker = self._worker
        plan = {"n_steps": worker.n_steps, "signal": int(kind), "aim": aim, "chance": chance}
        command = [sys.executable, "-m", "tekoa.resume_run", worker.path, self.directory]
        try:
            ended = subprocess.run(
                [*map(str, command), json.dumps(plan)],
                env=_environment(self.directory.parent / "programs"),
                capture_output=True,
                text=True,
                check=False,
                timeout=worker.limit_seconds,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"A run took more than {worker.limit_seconds} seconds.") from None
        expected = -kind if kind in (0, signal.SIGKILL) else signals.EXIT_STOPPED
        if ended.returncode != expected:
            raise RuntimeError(
                f"A run of {worker.path} ended with code {ended.returncode} instead of "
                f"{expected}:\n{ended.stderr[-4000:]}"
            )


def _environment(programs: pathlib.Path) -> dict[str, str]:
    """The same path and settings as here; what one process compiled the next one reuses."""
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
            with contextlib.suppress(json.JSONDecodeError):  # Killed in the middle of it.
                yield json.loads(line)
