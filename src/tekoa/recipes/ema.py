"""Moving average of the weights: `ema=0.99`.

    python -m tekoa.recipes.ema --plot ema.png

Plain SGD at a high rate leaves the weights jumping about; their average, kept once per step, does
not. Evaluation, best checkpoints and prediction use the average.
"""

import optax

import tekoa
from tekoa.recipes import toy

EVERY = 20


def run(n_steps: int = 800) -> toy.Curves:
    """Trains both models and measures the weights and their average."""
    lines: dict[str, list[float]] = {}
    for library, make in toy.MODELS.items():
        loop = tekoa.TrainLoop(
            make(),
            toy.make_task(optax.sgd(0.5), batch_size=8),
            n_steps=n_steps,
            n_steps_per_checkpoint=EVERY,
            ema=0.99,
        )
        average = toy.make_evaluation(loop, label="average")
        weights = toy.make_evaluation(loop, label="weights", use_average=False)
        found = [weights(average(checkpoint)).metrics for checkpoint in loop]
        for kind in ("weights", "average"):
            lines[f"{library}, {kind}"] = [metrics[kind]["loss"] for metrics in found]
            print(f"{library}: test loss of the {kind} {found[-1][kind]['loss']:.4f}")
        exported = loop.state.eval_params  # The average, as a plain tree.
        print(f"{library}: exports {', '.join(exported)}")
    steps = range(EVERY, n_steps + 1, EVERY)
    return toy.Curves(lines=lines, x=steps, y_label="test loss", is_log=True)


if __name__ == "__main__":
    toy.main(run, __doc__)
