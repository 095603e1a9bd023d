"""Trains the bundled CNN with a loop as a user would write it; part of estimator.py.

Run: python bench/estimator_by_hand.py PATTERN DIRECTORY N_STEPS SAVES
Prints seconds per step after the first 100.
"""

import functools
import pathlib
import sys
import time

import jax
import numpy as np
import optax
from tensorboardX import SummaryWriter

from tekoa import data
from tekoa.estimator.model_file.experiment import DataFacts
from tekoa.models import mnist

BATCH, EVERY = 32, 100


def shuffled(source):
    """Yields batches of arrays in memory forever."""
    whole = next(source.batches(len(source), epochs=1))
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(source))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            yield {name: values[rows] for name, values in whole.items()}


def main():
    pattern, directory, n_steps, saves = sys.argv[1:]
    source = data.load(pattern)
    batches = shuffled(source)
    sample = next(batches)
    facts = DataFacts(info=source.info, n_examples=len(source), batch_size=BATCH, sample=sample)
    config = mnist.get_config()
    config.optimizer = "amos"
    found = mnist.experiment(config, facts)
    tx, model = found.make_optimizer(), found.model
    params = model.init(jax.random.key(0), sample["image"])["params"]
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        (value, _), grads = jax.value_and_grad(
            lambda p: mnist.loss(model.apply({"params": p}, batch["image"]), batch), has_aux=True
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    writer = SummaryWriter(directory)
    start = 0.0
    for i in range(1, int(n_steps) + 1):
        params, opt_state, value = step(params, opt_state, next(batches))
        if i % EVERY == 0:
            if int(saves):
                writer.add_scalar("train/loss", float(value), i)
                leaves = jax.device_get(jax.tree.leaves((params, opt_state)))
                np.savez(pathlib.Path(directory) / f"step_{i}.npz", *leaves)
            if i == EVERY:
                value.block_until_ready()
                start = time.time()
    value.block_until_ready()
    print((time.time() - start) / (int(n_steps) - EVERY))


if __name__ == "__main__":
    main()
