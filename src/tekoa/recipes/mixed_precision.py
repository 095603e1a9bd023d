"""Mixed precision: `precision="bf16"`.

    python -m tekoa.recipes.mixed_precision --plot mixed_precision.png

The model runs in bfloat16; parameters, optimizer state and averages stay float32. This saves time
and memory on hardware with bfloat16 support; a CPU only shows that the loss is the same.
"""

import jax
import optax

import tekoa
from tekoa.recipes import toy

EVERY = 10


def run(n_steps: int = 200) -> toy.Curves:
    """Trains both models in both precisions."""
    lines = {}
    for library, make in toy.MODELS.items():
        for precision in ("float32", "bf16"):
            loop = tekoa.TrainLoop(
                model=make(),
                task=toy.make_task(optax.adam(3e-3)),
                n_steps=n_steps,
                n_steps_per_checkpoint=EVERY,
                precision=precision,
            )
            evaluate = toy.make_evaluation(loop)
            losses = [evaluate(checkpoint).metrics["eval"]["loss"] for checkpoint in loop]
            lines[f"{library}, {precision}"] = losses
            dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(loop.state.params)}
            print(f"{library}: test loss {losses[-1]:.4f} in {precision}, parameters {dtypes}")
    steps = range(EVERY, n_steps + 1, EVERY)
    return toy.Curves(lines=lines, x=steps, y_label="test loss", is_log=True)


if __name__ == "__main__":
    toy.main(run, __doc__)
