"""LBFGS and other line searches: pass `optax.lbfgs()` as the optimizer.

    python -m tekoa.recipes.lbfgs --plot lbfgs.png

The step passes the loss, the gradient and a function of the parameters to the optimizer; the
complete line search is part of the compiled step. On the full batch it is far better than Adam.
"""

import dataclasses

import optax

import tekoa
from tekoa.recipes import toy

OPTIMIZERS = {"Adam": optax.adam(1e-2), "LBFGS": optax.lbfgs()}


def run(n_steps: int = 50) -> toy.Curves:
    """Trains both models on one batch with two optimizers."""
    lines = {}
    for library, make in toy.MODELS.items():
        for name, optimizer in OPTIMIZERS.items():
            task = toy.make_task(optimizer, batch_size=1437)
            full_batch = next(iter(task.data))
            loop = tekoa.TrainLoop(
                model=make(),
                task=dataclasses.replace(task, data=[full_batch] * n_steps),
                n_steps=n_steps,
                n_steps_per_checkpoint=1,
            )
            losses = [float(checkpoint.loss) for checkpoint in loop]
            lines[f"{library}, {name}"] = losses
            print(f"{library}: {name} reaches {losses[-1]:.2e} in {n_steps} steps")
    x = range(1, n_steps + 1)
    return toy.Curves(lines=lines, x=x, y_label="training loss", is_log=True)


if __name__ == "__main__":
    toy.main(run, __doc__)
