"""The complete example: RNNLM on random tokens, evaluated, logged, stored and resumed.

python complete_example.py OUTPUT_DIR N_STEPS
"""

import sys

import numpy as np
import optax

from tekoa import (
    CheckpointFileReader,
    CheckpointFileWriter,
    EvalLoop,
    EvalTask,
    LowestCheckpointFileWriter,
    SummaryLogger,
    SummaryWriter,
    TrainLoop,
    TrainTask,
    combinator,
    random,
)
from tekoa.models import RNNLM


def main(output_dir, n_steps):
    keys = random.sequence(0)
    sizes = {"vocab_size": 16, "d_model": 8, "n_layers": 1}
    model, eval_model = RNNLM(**sizes), RNNLM(**sizes, deterministic=True)
    train_loop = TrainLoop(
        init=CheckpointFileReader(output_dir, target=model.init),
        task=TrainTask(
            apply=model.apply, optimizer=optax.adam(1e-2), loss=loss, data=tokens(40, seed=0)
        ),
        n_steps_per_checkpoint=10,
        n_steps=n_steps,
        rnkey=next(keys),
        collections={"init": ["params", "dropout"], "apply": ["dropout"]},
        mutable_collections=True,
        stdout=True,
    )
    process = combinator.serial(
        EvalLoop(
            task=EvalTask(
                apply=eval_model.apply,
                metrics={"loss": loss, "accuracy": accuracy},
                data=tokens(3, seed=1),
            ),
            collections={"init": ["params"], "apply": []},
            rnkey=next(keys),
        ),
        SummaryLogger(),
        SummaryWriter(output_dir),
        CheckpointFileWriter(output_dir),
        LowestCheckpointFileWriter(output_dir, "loss"),
    )
    for checkpoint in train_loop:
        process(checkpoint)


def tokens(n_batches, seed):
    drawn = np.random.default_rng(seed).integers(0, 16, (n_batches, 4, 9))
    return [(x[:, :-1], x[:, 1:]) for x in drawn]


def loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).mean()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
