"""Kills trainers over and over, each a fresh process forked from this one.

Imports are done once; only children touch devices. Prints one JSON line.
"""

import contextlib
import io
import json
import os
import random
import signal
import sys
import time
import warnings

import tensorstore  # noqa: F401  (shared by all children)
import trainer

from tekoa.store import store as _  # noqa: F401
from tekoa.store.commit import paths
from tekoa.store.read import inspect


def spawn(argv, environment):
    """Starts a trainer; returns its pid and the pipe of its standard output."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid:
        os.close(writer)
        return pid, os.fdopen(reader, "r")
    code = 1
    try:
        os.environ.update(environment)
        os.dup2(writer, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb"), write_through=True)
        trainer.run(trainer.parse(argv))
        code = 0
    except SystemExit as error:
        code = error.code
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def main(directory, n_kills, points):
    rng = random.Random(0)
    n_torn, n_wrong, n_left, lost, killed = 0, 0, 0, 0, 0
    argv = [directory, "--steps", "1000000", "--keep", "2"]
    for i in range(n_kills):
        point = points[i % len(points)] if points else None
        fault = {"TEKOA_FAULT_AT": f"{point}:{rng.randint(1, 3)}:SIGKILL"} if point else {}
        pid, lines = spawn(argv, fault)
        facts = json.loads(lines.readline())
        n_wrong += facts["event"] != "start" or facts["wrong"] or bool(facts["skipped"])
        n_left += len(facts.get("left", []))
        last = facts.get("step", 0)
        if not point:
            lines.readline()
            time.sleep(rng.uniform(0, 0.3))
            os.kill(pid, signal.SIGKILL)
        for line in lines:
            last = max(last, json.loads(line).get("step", 0))
        status = os.waitpid(pid, 0)[1]
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        infos = inspect.inspect(directory, verify="full")
        n_torn += sum(bool(info.problem) for info in infos)
        newest = infos[-1].step if infos else 0
        lost = max(lost, last - newest)
    steps = paths.list_steps(directory)
    argv[2] = str(steps[-1] + 5 if steps else 5)
    pid, lines = spawn([*argv[:3], "--keep", "2"], {})
    facts = json.loads(lines.readline())
    n_wrong += facts["event"] != "start" or facts["wrong"]
    n_left += len(facts.get("left", []))
    end = [json.loads(line) for line in lines]
    status = os.waitpid(pid, 0)[1]
    print(
        json.dumps(
            {
                "kills": killed,
                "torn": n_torn,
                "wrong": n_wrong,
                "left": n_left,
                "max_steps_lost": lost,
                "ended": status == 0 and end[-1]["event"] == "end",
                "files": sorted(os.listdir(directory)),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",") if len(sys.argv) > 3 else [])
