"""Rates by parameter: `param_groups({"kernel$": schedule, "bias$": 1e-2}, make=optax.adam)`.

    python -m tekoa.recipes.rates --plot rates.png

The same table of name patterns works for every model library. The rate of each group is a metric
of every checkpoint, so it appears in logs and in TensorBoard.
"""

import optax

import tekoa
from tekoa.recipes import toy

EVERY = 10


def run(n_steps: int = 300) -> toy.Curves:
    """Trains both models with a warm-up for kernels and a frozen bias."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, n_steps // 5, n_steps)
    table = {"out/bias$": "freeze", "kernel$": schedule, "bias$": 5e-3}
    lines = {}
    for library, make in toy.MODELS.items():
        loop = tekoa.TrainLoop(
            model=make(),
            task=toy.make_task(tekoa.param_groups(table, make=optax.adam)),
            n_steps=n_steps,
            n_steps_per_checkpoint=EVERY,
        )
        checkpoints = list(loop)
        for group in table:
            lines[group] = [checkpoint.metrics["rates"][group] for checkpoint in checkpoints]
        last = checkpoints[-1]
        metrics = toy.make_evaluation(loop)(last).metrics["eval"]
        print(f"{library}: test accuracy {metrics['accuracy']:.3f}; rates at the end:")
        print("  " + ", ".join(f"{k} {v:.2g}" for k, v in last.metrics["rates"].items()))
        frozen = loop.state.params["out"]["bias"]
        print(f"  the frozen bias is still {'zero' if not frozen.any() else frozen}")
    return toy.Curves(lines=lines, x=range(EVERY, n_steps + 1, EVERY), y_label="rate")


if __name__ == "__main__":
    toy.main(run, __doc__)
