"""Saves steps on the disk that `disk_shim.c` makes slow or failing. Prints one JSON line.

The lease is renewed as often, and other processes are waited for as briefly, as makes a renewal
that disturbs a save visible at once.
"""

import json
import logging
import pathlib
import sys

import numpy as np

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import lease


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def save_slowly(directory, switch, on_slow_save):
    lease.RENEW_SECONDS, lease._LOCK_SECONDS = 0.02, 0.3
    with store.Store(
        directory, keep=[store.KeepEvery(1)], fatal_after=1, on_slow_save=on_slow_save
    ) as writer:
        switch("slow").write_text("0.5")
        for step in (1, 2, 3):
            writer.save(step, {"x": np.full(3, step)})
        writer.wait()
        switch("slow").unlink()
        return {"steps": writer.steps(), "late": writer.n_late_saves}


def fail(directory, switch, number):
    with store.Store(directory, keep=[store.KeepEvery(1)]) as writer:
        writer.save(1, {"x": np.full(3, 1)})
        writer.wait()
        switch("fail").write_text(number)
        writer.save(2, {"x": np.full(3, 2)})
        writer.wait()
        left = [path.name for path in directory.iterdir() if ".tmp" in path.name]
        switch("fail").unlink()
        writer.save(3, {"x": np.full(3, 3)})
        writer.wait()
        return {"steps": writer.steps(), "left": left}


def main(directory, what, option):
    lines = Lines()
    logging.getLogger("tekoa.store").addHandler(lines)
    work = {"slow": save_slowly, "fail": fail}[what]
    try:
        facts = work(directory, lambda ending: pathlib.Path(f"{directory}.{ending}"), option)
    except errors.StoreError as error:
        facts = {"error": str(error)}
    print(json.dumps({**facts, "lines": lines.lines}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
