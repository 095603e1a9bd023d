"""Compares the time and slot memory of sphere, Amos and the classic family with optax.

Run: python bench/optimizers.py [--rounds 30] [--dtype float32 bfloat16] [--tokens 256]

The first tables are of updates alone, from gradients that are already in memory. The last one is
of training steps of a transformer, with the share of the optimizer in CPU time.
"""

import argparse
import functools
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import timing

from tekoa.core import trees
from tekoa.models import transformer_lm
from tekoa.optim import muon, sphere
from tekoa.optim.amos import transform as amos_lib
from tekoa.optim.scales.auto import scales_of_function
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


def train_stepper(tx, params, loss, batch):
    """A donated, jitted training step that keeps its own state."""
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    held = [step(jax.tree.map(jnp.copy, params), state, batch)]

    def run():
        start = time.process_time()
        held[0] = step(*held[0], batch)
        jax.block_until_ready(held[0])
        return time.process_time() - start

    return run


def measure_training(n_tokens: int, n_rounds: int) -> None:
    """Measures training steps of a model of 20 million parameters."""
    model = transformer_lm.TransformerLM(8192, n_layers=6, width=512, n_heads=8, mlp_width=1024)
    tokens = jax.random.randint(jax.random.key(0), (-(-n_tokens // 64), 64), 0, 8192)
    params = nn.meta.unbox(model.init(jax.random.key(0), tokens))["params"]

    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    table = scales_of_function(loss, params, tokens)
    contestants = {
        "sgd": optax.sgd(1e-3),
        "adamw": optax.adamw(1e-3),
        "sphere": sphere.sphere(table, n_steps=1000),
        "sphere reduced": sphere.sphere(table, n_steps=1000, is_reduced=True),
        "muon by roles": muon.muon_for(table, n_steps=1000),
    }
    runs = {name: train_stepper(tx, params, loss, tokens) for name, tx in contestants.items()}
    rounds = [{name: run() for name, run in runs.items()} for _ in range(2 + n_rounds)][2:]
    seconds = {name: min(times[name] for times in rounds) for name in runs}
    print(f"\ntraining steps of {trees.n_elements(params) / 1e6:.1f} M parameters, {tokens.size}")
    print(f"tokens: CPU time, minimum of {n_rounds} interleaved rounds")
    print(f"{'':24}{'ms':>8}{'/adamw':>9}{'beyond sgd /adamw':>19}")
    own = {name: value - seconds["sgd"] for name, value in seconds.items()}
    for name, value in seconds.items():
        ratios = f"{value / seconds['adamw']:9.2f}{own[name] / own['adamw']:19.2f}"
        print(f"{name:24}{1e3 * value:8.1f}{ratios}")


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
    parser.add_argument("--tokens", type=int, default=256, help="in a batch of a training step")
    args = parser.parse_args()
    for dtype in args.dtype:
        measure(dtype, args.rounds)
    measure_training(args.tokens, args.rounds)
    import_cost(10)


if __name__ == "__main__":
    main()
