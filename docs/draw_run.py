"""Draws the curves of a run into a picture, as in the README.

Run: pip install matplotlib tensorboard, then python docs/draw_run.py MODEL_DIR PICTURE.png
"""

import sys

import matplotlib.pyplot as plt
from tensorboard.backend.event_processing import event_accumulator

PANELS = [
    ("loss", {"train/loss": "training", "train/valid_loss": "test"}),
    ("test accuracy", {"train/valid_test_accuracy": "test"}),
    (
        "root mean square of kernels",
        {f"params/{name}/kernel": name for name in ["Conv_0", "Conv_1", "Dense_0", "Dense_1"]},
    ),
]


def main() -> None:
    """Draws what the command line names."""
    directory, picture = sys.argv[1:]
    events = event_accumulator.EventAccumulator(f"{directory}/train")
    events.Reload()
    tags = events.Tags()["scalars"]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3), layout="constrained")
    for axis, (title, curves) in zip(axes, PANELS, strict=True):
        for start, label in curves.items():
            tag = next(tag for tag in tags if tag.startswith(start))
            points = events.Scalars(tag)
            axis.plot([p.step for p in points], [p.value for p in points], label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    figure.savefig(picture, dpi=90)


if __name__ == "__main__":
    main()
