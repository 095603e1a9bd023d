"""One run for `tekoa.resume_check`: a process that trains until a signal ends it.

`python -m tekoa.resume_run PATH DIRECTORY PLAN` imports `make_loop` from PATH
('module:function' or 'file.py:function'), goes on from the newest step of DIRECTORY, saves
every checkpoint there and appends a line per checkpoint to `notes`. PLAN is JSON: n_steps
in total, and the signal to send to itself a while after the checkpoint it is aimed at.
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

import jax
import numpy as np

from tekoa.core import trees
from tekoa.extensions import files
from tekoa.loop.checkpoint import Summary
from tekoa.store import signals

_KEEP_ALL = 10**9
# The signal comes at most so long after its checkpoint; the first stretch, which also
# compiles, tells nothing of how long the others take.
_MAX_DELAY_SECONDS = 1.0
_FIRST_DELAY_SECONDS = 0.05
# Told of a run but no result of it: it differs between two undisturbed runs.
_TIME = "/seconds_per_step"


def train(path: str, directory: pathlib.Path, plan: dict[str, Any]) -> int:
    """Trains as the plan says; gives the exit code, that of a stop if there was one."""
    make_loop = import_function(path)
    with signals.stop_flag() as flag, contextlib.ExitStack() as stack:
        loop = make_loop(lambda target: files.CheckpointFileReader(directory, target))
        loop._runner.stop_flag = flag  # The user's function knows nothing of signals.
        writer = files.CheckpointFileWriter(directory, keep=_KEEP_ALL)
        stack.enter_context(contextlib.closing(writer))
        notes = stack.enter_context((directory / "notes").open("a"))
        start, bomb = loop.step, Bomb(plan)
        bomb.see(start, _FIRST_DELAY_SECONDS)
        n_steps = loop.n_steps if plan["n_steps"] is None else plan["n_steps"]
        for i, checkpoint in enumerate(loop if n_steps is None else loop(n_steps=n_steps)):
            line = {"step": checkpoint.step, "start": start, "digests": digests(checkpoint)}
            # On a line of its own even if the last one was cut short.
            print(f"\n{json.dumps(line)}", file=notes, flush=True)
            writer(checkpoint)
            bomb.see(checkpoint.step, checkpoint.elapsed_time if i else _FIRST_DELAY_SECONDS)
        bomb.wait()
    return signals.EXIT_STOPPED if flag.is_set() else 0


def import_function(path: str) -> Callable[..., Any]:
    """Imports 'module:function' or 'file.py:function'.

    Raises:
        ValueError: If the path has another form.
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
    # As for a script: it may import what stands beside it.
    sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


class Bomb:
    """Sends this process a signal, a while after the step it is aimed at.

    Args:
        plan: `signal` (0: none), `aim` (a step) and `chance` (of the delay, in [0, 1)).
    """

    def __init__(self, plan: dict[str, Any]):
        self._plan, self._thread = plan, None

    def see(self, step: int, seconds: float) -> None:
        """Tells of a step that was reached, and how long it is to the next checkpoint."""
        plan = self._plan
        if not plan["signal"] or self._thread is not None or step < plan["aim"]:
            return
        delay = plan["chance"] * min(seconds, _MAX_DELAY_SECONDS)
        self._thread = threading.Timer(delay, os.kill, (os.getpid(), plan["signal"]))
        self._thread.start()

    def wait(self) -> None:
        """Waits for the signal, if one is still to come."""
        self.see(self._plan["aim"], 0.0)
        if self._thread is not None:
            self._thread.join()


def digests(checkpoint: Summary) -> dict[str, str]:
    """Gives a short text for every leaf of a state, its metrics and its place in the data."""
    items = {**files.items_of(checkpoint.state), "loss": checkpoint.loss}
    found = {name: _digest(x) for name, x in trees.flatten_named(items).items()}
    for name, value in files.flat_metrics(checkpoint).items():
        if not name.endswith(_TIME):
            found[f"metrics/{name}"] = float(value).hex()
    found["position in the data"] = json.dumps(checkpoint.data_state, sort_keys=True)
    return found


def _digest(x: Any) -> str:
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(x) if is_key else x)
    head = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(train(sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])))
