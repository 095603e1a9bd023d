"""The worker process of `tekoa.testing.kills`: trains until a signal ends it.

`python -m tekoa.testing.kill_worker PATH DIRECTORY PLAN` imports `make_loop` from PATH
('module:function' or 'file.py:function'), resumes from the newest step of DIRECTORY, saves every
checkpoint there and appends a line per checkpoint to the file `notes`. PLAN is JSON: the total
n_steps, and the signal that the process sends itself shortly after the step it is aimed at.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tekoa.core import trees
from tekoa.extensions import checkpoint_files, monitor
from tekoa.hosts import signals
from tekoa.loop.checkpoint import Summary

_KEEP_ALL = 10**9
# Limits for the delay of the signal after its checkpoint. The first segment also compiles, so its
# duration says nothing about the others.
_MAX_DELAY_SECONDS = 1.0
_FIRST_DELAY_SECONDS = 0.05
# Not a result of the run: it differs between two uninterrupted runs.
_TIMING_SUFFIX, _TIMING_GROUP = "/seconds_per_step", f"{monitor.GROUP}/"


def train(path: str, directory: pathlib.Path, plan: dict[str, Any]) -> int:
    """Trains according to the plan and returns the exit code."""
    make_loop = import_function(path)
    with signals.stop_flag() as flag, contextlib.ExitStack() as stack:
        loop = make_loop(lambda target: checkpoint_files.CheckpointFileReader(directory, target))
        loop.stop_flag = flag  # The user's function does not handle signals.
        writer = checkpoint_files.CheckpointFileWriter(directory, keep=_KEEP_ALL)
        stack.enter_context(contextlib.closing(writer))
        notes = stack.enter_context((directory / "notes").open("a"))
        start, delayed_signal = loop.step, DelayedSignal(plan)
        delayed_signal.reached(start, _FIRST_DELAY_SECONDS)
        n_steps = loop.n_steps if plan["n_steps"] is None else plan["n_steps"]
        for i, checkpoint in enumerate(loop if n_steps is None else loop.until(n_steps)):
            line = {"step": checkpoint.step, "start": start, "digests": digests(checkpoint)}
            # Starts a new line, since the last one may have been cut short.
            print(f"\n{json.dumps(line)}", file=notes, flush=True)
            writer(checkpoint)
            seconds = checkpoint.elapsed_time if i else _FIRST_DELAY_SECONDS
            delayed_signal.reached(checkpoint.step, seconds)
        delayed_signal.wait()
    return signals.EXIT_STOPPED if flag.is_set() else 0


def import_function(path: str) -> Callable[..., Any]:
    """Imports 'module:function' or 'file.py:function'.

    Raises:
        ValueError: If the path has a different form.
        AttributeError: If there is no such function.

    >>> import_function('math:sqrt')(4.0)
    2.0
    """
    where, _, name = path.rpartition(":")
    if not where:
        raise ValueError(f"{path!r} is not 'module:function' or 'file.py:function'.")
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), name)
    file = pathlib.Path(where)
    spec = importlib.util.spec_from_file_location(f"_checked_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{where!r} cannot be imported.")
    # As for a script, which may import modules from its own directory.
    sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


class DelayedSignal:
    """Sends this process a signal, shortly after the step it is aimed at.

    Args:
        plan: `signal` (0: none), `aim` (a step) and `delay` (a fraction of the
            time until the next checkpoint, in [0, 1)).
    """

    def __init__(self, plan: dict[str, Any]):
        self._plan, self._thread = plan, None

    def reached(self, step: int, seconds: float) -> None:
        """Starts the delay if the step is the one aimed at or later.

        Args:
            step: The step of a checkpoint.
            seconds: Expected time until the next checkpoint.
        """
        plan = self._plan
        if not plan["signal"] or self._thread is not None or step < plan["aim"]:
            return
        delay = plan["delay"] * min(seconds, _MAX_DELAY_SECONDS)
        self._thread = threading.Timer(delay, os.kill, (os.getpid(), plan["signal"]))
        self._thread.start()

    def wait(self) -> None:
        """Waits until the signal was sent, if there is one."""
        self.reached(self._plan["aim"], 0.0)
        if self._thread is not None:
            self._thread.join()


def digests(checkpoint: Summary) -> dict[str, str]:
    """Returns a short digest of every leaf of the state, the metrics and the data position."""
    items = {**checkpoint_files.items_of(checkpoint.state), "loss": checkpoint.loss}
    by_name = {name: _digest(x) for name, x in trees.flatten_named(items).items()}
    for name, value in checkpoint.scalars.items():
        if not name.endswith(_TIMING_SUFFIX) and not name.startswith(_TIMING_GROUP):
            by_name[f"metrics/{name}"] = float(value).hex()
    by_name["data position"] = json.dumps(checkpoint.data_state, sort_keys=True)
    return by_name


def _digest(x: Any) -> str:
    array = trees.to_numpy(x)
    head = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(train(sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])))
