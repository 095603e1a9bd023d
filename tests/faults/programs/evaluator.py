"""Restores the newest step repeatedly while a trainer runs. Prints one JSON line."""

import json
import sys
import time

import numpy as np
from trainer import state_at

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import paths
from tekoa.store.read import hold


def main(directory, seconds, own, size):
    target = {"model_params": {"0": np.zeros(size, np.uint32), "1": np.zeros(size, np.uint32)}}
    n_restores, n_failed, n_wrong, n_gone, first_error = 0, 0, 0, 0, ""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if own == "-":
                restored = store.restore(directory, target)
            else:
                restored = pinned_restore(directory, own, target)
        except errors.StepGoneError:
            n_gone += 1
            continue
        except errors.StoreError as error:
            n_failed += 1
            first_error = first_error or str(error)
            continue
        if restored is None:
            continue
        n_restores += 1
        expected = state_at(restored.step, size)
        tree = restored.items["model_params"]
        n_wrong += not all(np.array_equal(leaf, expected) for leaf in tree.values())
    print(
        json.dumps(
            {
                "restores": n_restores,
                "failed": n_failed,
                "wrong": n_wrong,
                "gone_before_held": n_gone,
                "first_error": first_error,
            }
        )
    )


def pinned_restore(directory, own, target):
    steps = paths.list_steps(directory)
    if not steps:
        return None
    with hold.pinned(directory, steps[-1], own) as path:
        time.sleep(0.02)
        return store.restore(path.parent, target)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
