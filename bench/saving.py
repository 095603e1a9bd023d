"""Compares the steps per second of a run that saves every 100 steps with one that does not.

Run: python bench/saving.py [--rounds 7]
The MNIST-size CNN with Adam (10 MB of state). Both do the same steps alternately; the time
of the run that saves includes the end of its last save. Ratio = steps per second with
saving over steps per second without; the goal is 0.97 or more.
"""

import argparse
import pathlib
import sys
import tempfile

import jax
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import loop_models as models
import timing

import tekoa

EVERY, N_STEPS = 100, 600


def training():
    model = models.Cnn()
    task = tekoa.TrainTask(
        apply=model.apply,
        optimizer=optax.adam(1e-3),
        loss=models.loss,
        data=models.shuffled(*models.arrays("cnn")),
    )
    return tekoa.TrainLoop(
        model.init, task, n_steps_per_checkpoint=EVERY, steps_per_dispatch=1, grads=False
    )


def contestant(writer=None):
    loop = training()

    def run():
        for checkpoint in loop(n_steps=loop.step + N_STEPS):
            if writer is not None:
                writer(checkpoint)
        if writer is not None:
            writer.wait()
        jax.block_until_ready(loop.state)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        writer = tekoa.CheckpointFileWriter(directory, keep=1)
        contestants = {"saving": contestant(writer), "plain": contestant()}
        seconds = timing.interleave(contestants, n_rounds=options.rounds, n_warm=1)
        writer.close()
    for name, values in seconds.items():
        print(f"{name:<8} {timing.milliseconds(values) / N_STEPS:8.2f} ms per step")
    print(
        f"ratio of steps per second, saving / plain: {timing.ratio(seconds, 'plain', 'saving'):.3f}"
    )


if __name__ == "__main__":
    main()
