"""Fills the disk under a trainer and frees it again.

Called with a directory on a small file system, or with a limit on the size of files.
Prints one JSON line.
"""

import json
import logging
import pathlib
import resource
import sys
import time

import jax.numpy as jnp
import numpy as np

from tekoa import store

MIB = 2**20


class Reports(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def fill(directory):
    (directory / "ballast").write_bytes(b"\1" * (25 * MIB))
    return (directory / "ballast").unlink


def limit(_):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def n_bytes(directory):
    return sum(path.stat().st_size for path in directory.rglob("*"))


def main(directory, break_disk):
    reports = Reports()
    logging.getLogger("tekoa.store").addHandler(reports)
    writer = store.Store(directory, keep=[store.KeepLast(2)])
    rng = np.random.default_rng(0)

    def tree(step):
        return {"model_params": jnp.asarray(rng.normal(size=5 * MIB).astype(np.float32) + step)}

    for step in (1, 2):
        writer.save(step, tree(step))
        writer.wait()
    free = break_disk(directory)
    before = n_bytes(directory)
    writer.save(3, tree(3))
    # Steps of a loop that polls: the report must not wait for one.
    n_steps_late = 0
    while writer._saver._thread.is_alive():
        time.sleep(0.001)
    while not reports.lines and n_steps_late < 100:
        writer.poll()
        n_steps_late += 1
    leftover = n_bytes(directory) - before
    intact = store.load(directory)["step"] == 2
    free()
    writer.save(4, tree(4))
    writer.close()
    print(
        json.dumps(
            {
                "steps_until_reported": n_steps_late,
                "leftover_bytes": leftover,
                "older_intact": intact,
                "recovered": store.load(directory)["step"] == 4,
                "report": reports.lines[0][-160:] if reports.lines else "",
            }
        )
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), {"full": fill, "limit": limit}[sys.argv[2]])
