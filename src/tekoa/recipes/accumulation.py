"""Gradient accumulation: `accumulate=4`.

    python -m tekoa.recipes.accumulation --plot accumulation.png

Each step splits its batch into parts and sums their gradients, so schedules, averages and
checkpoints work as before. The result equals that of the full batch, with the memory of one part.
"""

from typing import Any

import jax
import optax

import tekoa
from tekoa.recipes import toy

PARTS = (1, 2, 4, 8)
BATCH_SIZE = 1024


def run(n_steps: int = 10) -> toy.Curves:
    """Trains both models with and without accumulation, and measures the memory of a step."""
    lines = {}
    for library, make in toy.MODELS.items():
        losses = {}
        for parts in (1, 4):
            loop = tekoa.TrainLoop(
                model=make(),
                task=toy.make_task(optax.adam(1e-2), BATCH_SIZE),
                n_steps=n_steps,
                n_steps_per_checkpoint=n_steps,
                accumulate=parts,
            )
            losses[parts] = [float(checkpoint.loss) for checkpoint in loop][-1]
        print(f"{library}: loss {losses[1]:.6f} with full batches, {losses[4]:.6f} with four parts")
        lines[library] = [_megabytes(make(), parts) for parts in PARTS]
        megabytes = ", ".join(f"{n:.2f}" for n in lines[library])
        print(f"  temporary memory in MB, with {PARTS} parts: {megabytes}")
    return toy.Curves(lines=lines, x=PARTS, x_label="parts", y_label="temporary memory (MB)")


def _megabytes(model: object, parts: int) -> float:
    fns, optimizer = tekoa.as_model_fns(model), optax.adam(1e-2)
    task = toy.make_task(optimizer, BATCH_SIZE)
    batch = next(iter(task.data))
    inputs, _ = toy.split_batch(batch)
    state = tekoa.init_state(fns, optimizer, jax.random.key(0), inputs=inputs)
    step = tekoa.make_train_step(fns, task.loss, optimizer, accumulate=parts, split=toy.split_batch)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes / 1e6


if __name__ == "__main__":
    toy.main(run, __doc__)
