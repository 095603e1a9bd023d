"""Restores arrays onto all available devices, checks them, and saves changed ones."""

import json
import sys

import jax
import numpy as np

from tekoa import store

SHAPES = {"rows": (16, 6), "both": (8, 4), "odd": (7, 3), "scalar": ()}


def expected(step):
    return {
        name: np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + step / 7
        for name, shape in SHAPES.items()
    }


def spread(tree):
    n = len(jax.devices())
    mesh = jax.make_mesh((n // 2 or 1, 2 if n > 1 else 1), ("a", "b"))
    parts = {
        "rows": jax.P(("a", "b")),
        "both": jax.P("a", "b"),
        "odd": jax.P(),
        "scalar": jax.P(),
    }
    return {
        name: jax.device_put(value, jax.sharding.NamedSharding(mesh, parts[name]))
        for name, value in tree.items()
    }


with store.Store(sys.argv[1], keep=[store.KeepLast(10)]) as writer:
    target = spread(expected(-1))
    restored = writer.restore({"model_params": target})
    step = 0 if restored is None else restored.step
    tree = spread(expected(0)) if restored is None else restored.items["model_params"]
    exact = all(np.array_equal(tree[name], value) for name, value in expected(step).items())
    placed = all(tree[name].sharding == target[name].sharding for name in tree)
    writer.save(step + 1, {"model_params": spread(expected(step + 1))})
facts = {"devices": len(jax.devices()), "step": step, "exact": exact, "placed": placed}
print(json.dumps(facts))
