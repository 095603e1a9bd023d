"""Compares the time and slot memory of sphere, Amos and the classic family with optax.

Run: python bench/optimizers.py [--rounds 30] [--dtype float32 bfloat16]
"""

import argparse
import functools
import pathlib
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import timing

from tekoa.core import trees
from tekoa.optim import sphere
from tekoa.optim.amos import transform as amos_lib
from tekoa.optim.scales.roles import Role
from tekoa.optim.scales.table import ScaleRow, ScaleTable
from tekoa.optim.triples import classic, convert


def transformer_tree(dtype: str, n_layers: int = 6, width: int = 512, vocab: int = 8192):
    """Returns about 23 million parameters with small values."""
    shapes = {"embed": {"embedding": (vocab, width)}}
    for i in range(n_layers):
        shapes[f"layer_{i}"] = {
            "norm_1": {"scale": (width,)},
            "norm_2": {"scale": (width,)},
            **{k: {"kernel": (width, width), "bias": (width,)} for k in ["q", "k", "v", "o"]},
            "up": {"kernel": (width, 4 * width), "bias": (4 * width,)},
            "down": {"kernel": (4 * width, width), "bias": (width,)},
        }
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    return jax.tree.map(
        lambda shape: 0.02 * jax.random.normal(next(keys), shape, dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def eta(name, shape):
    return 1.0 if len(shape) < 2 else shape[0] ** -0.5


def reduced(name, shape):
    """Kernels keep the output axis, embeddings the row axis."""
    if name[-1] == "embedding":
        return (shape[0], 1)
    return (1, shape[1]) if len(shape) == 2 else ()


def scale_table(params):
    """Returns the roles that the model would give these parameters."""

    def row(name, shape):
        kind, contracted = "added", ()
        if len(shape) == 2:
            kind, contracted = "looked up" if name[-1] == "embedding" else "contracted", (0,)
        free = tuple(i for i in range(len(shape)) if i not in contracted)
        return ScaleRow(
            name=name,
            shape=shape,
            eta=eta(name, shape),
            slot_shape=reduced(name, shape),
            role=Role(kind=kind, contracted=contracted, free=free),
            reason="by hand",
        )

    shapes = [x.shape for x in jax.tree.leaves(params)]
    return ScaleTable([row(*pair) for pair in zip(trees.leaf_names(params), shapes)])


def optimizers(params):
    amos = functools.partial(amos_lib.amos, 1e-3, eta)
    table = scale_table(params)
    return {
        "sphere": sphere.sphere(table, n_steps=1000),
        "sphere reduced": sphere.sphere(table, n_steps=1000, is_reduced=True),
        "adamw": optax.adamw(1e-3),
        "adam": optax.adam(1e-3),
        "amos reduced": amos(reduced),
        "amos reduced, momentum": amos(reduced, momentum=0.9),
        "amos full": amos(),
        "classic adam": convert.from_triple(classic.adam(1e-3)),
    }


def stepper(tx, params, grads):
    """A donated, jitted update that keeps its own state."""
    state = tx.init(params)
    params = jax.tree.map(jnp.copy, params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    held = [step(params, state, grads)]

    def run():
        held[0] = step(*held[0], grads)
        jax.block_until_ready(held[0])

    return run


def classic_stepper(triple, params, grads):
    """A triple as users write it: the state holds the parameters."""
    init, update, _ = triple
    step = jax.jit(update, donate_argnums=2)
    held = [step(0, grads, init(jax.tree.map(jnp.copy, params)))]

    def run():
        held[0] = step(1, grads, held[0])
        jax.block_until_ready(held[0])

    return run


def plain_pass(params, grads):
    """One donated pass `a*0.9 + b` over the same numbers: the memory bandwidth."""
    step = jax.jit(lambda a, b: jax.tree.map(lambda x, y: x * 0.9 + y, a, b), donate_argnums=0)
    held = [step(jax.tree.map(jnp.copy, params), grads)]

    def run():
        held[0] = step(held[0], grads)
        jax.block_until_ready(held[0])

    return run


def measure(dtype: str, n_rounds: int) -> None:
    params = transformer_tree(dtype)
    grads = jax.tree.map(lambda x: x * 0.1, params)
    made = optimizers(params)
    runs = {name: stepper(tx, params, grads) for name, tx in made.items() if name != "classic adam"}
    runs["classic adam"] = classic_stepper(classic.adam(1e-3), params, grads)
    runs["pass"] = plain_pass(params, grads)
    seconds = timing.interleave(runs, n_rounds=n_rounds)
    slots = {name: trees.n_bytes(jax.eval_shape(tx.init, params)) for name, tx in made.items()}
    print(f"\n{dtype}, {trees.n_elements(params) / 1e6:.1f} M parameters, {n_rounds} rounds")
    print(f"{'':24}{'ms':>8}{'/adamw':>9}{'/adam':>9}{'/pass':>9}{'slots/adamw':>13}")
    for name in runs:
        memory = f"{slots[name] / slots['adamw']:13.4f}" if name in slots else ""
        ratios = [timing.ratio(seconds, name, base) for base in ("adamw", "adam", "pass")]
        print(
            f"{name:24}{timing.milliseconds(seconds[name]):8.1f}"
            + "".join(f"{r:9.2f}" for r in ratios)
            + memory
        )


IMPORT = """
import time, jax
start = time.perf_counter()
import tekoa
print(1e3 * (time.perf_counter() - start))
"""


def import_cost(n_rounds: int) -> None:
    """Measures in processes that have imported jax, whose own time varies by 100 ms."""
    shown = [
        subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True).stdout
        for _ in range(n_rounds)
    ]
    extra = statistics.median(float(text) for text in shown)
    print(f"\nimport tekoa after import jax: {extra:.1f} ms ({n_rounds} rounds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    for dtype in args.dtype:
        measure(dtype, args.rounds)
    import_cost(10)


if __name__ == "__main__":
    main()
