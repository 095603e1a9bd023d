"""Moving average of the weights: `ema=0.99`.

    python -m tekoa.recipes.ema --plot ema.png

SGD at a high rate makes the weights noisy; their average, updated at every step, is smooth.
Evaluation, best checkpoints and prediction use the average.
"""

import optax

import tekoa
from tekoa.recipes import toy

EVERY = 20


def run(n_steps: int = 800) -> toy.Curves:
    """Trains both models, and evaluates the weights and their average."""
    lines: dict[str, list[float]] = {}
    for library, make in toy.MODELS.items():
        loop = tekoa.TrainLoop(
            model=make(),
            task=toy.make_task(optax.sgd(0.5), batch_size=8),
            n_steps=n_steps,
            n_steps_per_checkpoint=EVERY,
            ema=0.99,
        )
        average = toy.make_evaluation(loop, label="average")
        weights = toy.make_evaluation(loop, label="weights", use_average=False)
        history = [weights(average(checkpoint)).metrics for checkpoint in loop]
        for kind in ("weights", "average"):
            lines[f"{library}, {kind}"] = [metrics[kind]["loss"] for metrics in history]
            print(f"{library}: test loss of the {kind} {history[-1][kind]['loss']:.4f}")
        params = loop.state.eval_params  # The average, as a plain tree.
        print(f"{library}: layers to export: {', '.join(params)}")
    steps = range(EVERY, n_steps + 1, EVERY)
    return toy.Curves(lines=lines, x=steps, y_label="test loss", is_log=True)


if __name__ == "__main__":
    toy.main(run, __doc__)
