"""Compares saving and restoring with Orbax's CheckpointManager and with a plain write.

Run: `python bench/checkpoint.py [--repeats 15]`. Every repeat runs all contestants
alternately on the same arrays and prints medians and their ratios. Tekoa computes checksums
of every file, syncs it, and verifies every byte it restores; Orbax does neither.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp

from tekoa import store
from tekoa.store.commit import paths


def make_tree(n_leaves, n_elements):
    rng = np.random.default_rng(0)
    layers = {}
    for i in range(n_leaves // 2):
        kernel = rng.normal(size=n_elements).astype(np.float32)
        layers[f"layer_{i}"] = {"bias": np.ones(10, np.float32) * i, "kernel": kernel}
    return jax.block_until_ready(jax.tree.map(jax.numpy.asarray, layers))


STATES = {"tiny": (20, 100), "100 MB": (20, 2_500_000)}


class Tekoa:
    """Tekoa's store: manifest, checksums and syncs; verifies every byte when it restores."""

    def __init__(self, directory):
        self.store = store.Store(directory, keep=[store.KeepLast(2)])

    def save(self, step, tree):
        self.store.save(step, {"model_params": tree})

    def wait(self):
        self.store.wait()

    def restore(self, tree):
        return self.store.restore({"model_params": tree}).items["model_params"]

    def close(self):
        self.store.close()


class Orbax:
    """Orbax's manager, set up as in its documentation."""

    def __init__(self, directory):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
        self.manager = ocp.CheckpointManager(directory, options=options)

    def save(self, step, tree):
        self.manager.save(step, args=ocp.args.StandardSave(tree))

    def wait(self):
        self.manager.wait_until_finished()

    def restore(self, tree):
        step = self.manager.latest_step()
        return self.manager.restore(step, args=ocp.args.StandardRestore(tree))

    def close(self):
        self.manager.close()


class Plain:
    """One file with the same bytes, synced: the speed of the disk."""

    def __init__(self, directory):
        self.path = pathlib.Path(directory) / "data"
        self.path.parent.mkdir()

    def save(self, step, tree):
        with open(self.path, "wb") as file:
            for leaf in jax.tree.leaves(tree):
                file.write(np.asarray(leaf).data)
            file.flush()
            os.fsync(file.fileno())

    def wait(self):
        pass

    def restore(self, tree):
        data = np.fromfile(self.path, np.uint8)
        leaves, offset = [], 0
        for leaf in jax.tree.leaves(tree):
            part = data[offset : offset + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
            leaves.append(jax.device_put(part))
            offset += leaf.nbytes
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def close(self):
        pass


CONTESTANTS = {"tekoa": Tekoa, "orbax": Orbax, "plain": Plain}


def clock(work, *args):
    started = time.perf_counter()
    result = jax.block_until_ready(work(*args))
    return (time.perf_counter() - started) * 1e3, result


def measure_state(root, shape, repeats):
    """Returns milliseconds by (operation, contestant) for pause, commit and restore."""
    tree = make_tree(*shape)
    root.mkdir()
    runs = {name: make(root / name) for name, make in CONTESTANTS.items()}
    times = {(what, name): [] for what in ("pause", "commit", "restore") for name in runs}
    for step in range(repeats + 2):
        # A new array every time, as after a training step, so that nothing is cached.
        tree = jax.block_until_ready(jax.tree.map(lambda x: x + 1, tree))
        order = list(runs.items())
        for name, run in order[step % 3 :] + order[: step % 3]:
            pause, _ = clock(run.save, step, tree)
            rest, _ = clock(run.wait)
            restore, back = clock(run.restore, tree)
            if step >= 2:  # The first two include imports and filling caches.
                times["pause", name].append(pause)
                times["commit", name].append(pause + rest)
                times["restore", name].append(restore)
            for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
                np.testing.assert_array_equal(a, b)
    for run in runs.values():
        run.close()
    return {key: statistics.median(values) for key, values in times.items()}


def measure_listing(root, repeats):
    for step in range(1000):
        (root / f"checkpoint_{step}").mkdir(parents=True)
        (root / f"checkpoint_{step}" / paths.MANIFEST).write_text("")
    return statistics.median(clock(paths.list_steps, root)[0] for _ in range(repeats))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    root = pathlib.Path(tempfile.mkdtemp(dir=options.directory))
    try:
        print(f"medians of {options.repeats} repeats, milliseconds; ratio = tekoa / orbax")
        for state, shape in STATES.items():
            found = measure_state(root / state.replace(" ", ""), shape, options.repeats)
            for what in ("pause", "commit", "restore"):
                tekoa, orbax, plain = (found[what, name] for name in CONTESTANTS)
                print(
                    f"{state:>7} {what:<8} tekoa {tekoa:8.2f}  orbax {orbax:8.2f}  "
                    f"plain {plain:8.2f}  ratio {tekoa / orbax:5.2f}"
                )
        listing = measure_listing(root / "listing", options.repeats)
        print(f"listing of 1000 steps {listing:.2f} ms")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
