"""A complete program: RNNLM on random tokens, evaluated, logged, saved and resumed.

python complete_example.py DIRECTORY N_STEPS
"""

import sys

import numpy as np
import optax

from tekoa import (
    BestFileWriter,
    CheckpointFileReader,
    CheckpointFileWriter,
    ConsoleLogger,
    EvalLoop,
    EvalTask,
    TensorBoardWriter,
    TrainLoop,
    TrainTask,
    random,
    serial,
)
from tekoa.models import RNNLM


def main(directory, n_steps):
    keys = random.sequence(0)
    sizes = {"vocab_size": 16, "d_model": 8, "n_layers": 1}
    model, eval_model = RNNLM(**sizes, deterministic=False), RNNLM(**sizes)
    train_loop = TrainLoop(
        model=CheckpointFileReader(directory, target=model.init),
        task=TrainTask(
            apply=model.apply, optimizer=optax.adam(1e-2), loss=loss, data=tokens(40, seed=0)
        ),
        n_steps_per_checkpoint=10,
        n_steps=n_steps,
        rng=next(keys),
        collections={"init": ["params", "dropout"], "apply": ["dropout"]},
        mutable_collections=True,
        stdout=True,
    )
    process = serial(
        EvalLoop(
            task=EvalTask(
                apply=eval_model.apply,
                metrics={"loss": loss, "accuracy": accuracy},
                data=tokens(3, seed=1),
            ),
            collections={"init": ["params"], "apply": []},
            rng=next(keys),
        ),
        ConsoleLogger(),
        TensorBoardWriter(directory),
        CheckpointFileWriter(directory),
        BestFileWriter(directory, "loss", mode="min"),
    )
    for checkpoint in train_loop:
        process(checkpoint)


def tokens(n_batches, seed):
    batches = np.random.default_rng(seed).integers(0, 16, (n_batches, 4, 9))
    return [(x[:, :-1], x[:, 1:]) for x in batches]


def loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).mean()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
