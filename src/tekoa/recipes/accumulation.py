"""Gradient accumulation: `accumulate=4`.

    python -m tekoa.recipes.accumulation --plot accumulation.png

The batch is run in parts inside the one step, so a step is still a step: schedules, averages and
checkpoints see nothing of it. The result is that of the whole batch; the memory is that of a part.
"""

from typing import Any

import jax
import optax

import tekoa
from tekoa.recipes import toy

PARTS = (1, 2, 4, 8)
BATCH_SIZE = 1024


def run(n_steps: int = 10) -> toy.Curves:
    """Trains both models whole and in parts, and asks XLA for the memory of each step."""
    lines = {}
    for library, make in toy.MODELS.items():
        losses = {}
        for parts in (1, 4):
            loop = tekoa.TrainLoop(
                make(),
                toy.make_task(optax.adam(1e-2), BATCH_SIZE),
                n_steps=n_steps,
                n_steps_per_checkpoint=n_steps,
                accumulate=parts,
                grads=False,
            )
            losses[parts] = [float(checkpoint.loss) for checkpoint in loop][-1]
        print(f"{library}: loss {losses[1]:.6f} by whole batches, {losses[4]:.6f} by four parts")
        lines[library] = [_megabytes(make(), parts) for parts in PARTS]
        told = ", ".join(f"{n:.2f}" for n in lines[library])
        print(f"  MB beside state and batch, in {PARTS} parts: {told}")
    return toy.Curves(lines=lines, x=PARTS, x_label="parts", y_label="MB beside state and batch")


def _megabytes(model: object, parts: int) -> float:
    fns, task = tekoa.as_model_fns(model), toy.make_task(optax.adam(1e-2), BATCH_SIZE)
    batch = next(iter(task.data))
    inputs, _ = toy.as_pair(batch)
    state = tekoa.init_state(fns, task.optimizer, jax.random.key(0), inputs=inputs)
    step = tekoa.make_train_step(
        fns, task.loss, task.optimizer, accumulate=parts, split=toy.as_pair
    )
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes / 1e6


if __name__ == "__main__":
    toy.main(run, __doc__)
