"""LBFGS and other line searches: pass `optax.lbfgs()` as the optimizer.

    python -m tekoa.recipes.lbfgs --plot lbfgs.png

The step hands over value, gradient and a function of the parameters; the whole search is inside
the one compiled step. On the full batch it leaves Adam far behind.
"""

import optax

import tekoa
from tekoa.recipes import toy

OPTIMIZERS = {"Adam": optax.adam(1e-2), "LBFGS": optax.lbfgs()}


def run(n_steps: int = 50) -> toy.Curves:
    """Trains both models on one batch by two optimizers."""
    lines = {}
    for library, make in toy.MODELS.items():
        for name, optimizer in OPTIMIZERS.items():
            task = toy.make_task(optimizer, batch_size=1437)
            whole = next(iter(task.data))
            loop = tekoa.TrainLoop(
                make(),
                tekoa.TrainTask(
                    optimizer=optimizer, loss=toy.loss, data=[whole] * n_steps, split=toy.as_pair
                ),
                n_steps=n_steps,
                n_steps_per_checkpoint=1,
                grads=False,
            )
            losses = [float(checkpoint.loss) for checkpoint in loop]
            lines[f"{library}, {name}"] = losses
            print(f"{library}: {name} comes to {losses[-1]:.2e} in {n_steps} steps")
    x = range(1, n_steps + 1)
    return toy.Curves(lines=lines, x=x, y_label="training loss", is_log=True)


if __name__ == "__main__":
    toy.main(run, __doc__)
