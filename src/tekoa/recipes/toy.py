"""Shared by the recipes: a small network in Linen and in NNX, the digits, a command line.

Replace all of it with your own model and data.
"""

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import tekoa

N_HIDDEN, N_CLASSES = 64, 10


class LinenMLP(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Returns logits (rows, classes)."""
        x = nn.relu(nn.Dense(N_HIDDEN, name="hidden")(flatten(image)))
        return nn.Dense(N_CLASSES, name="out")(x)


class NnxMLP(nnx.Module):
    """The same two dense layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(64, N_HIDDEN, rngs=rngs)
        self.out = nnx.Linear(N_HIDDEN, N_CLASSES, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Returns logits (rows, classes)."""
        return self.out(nnx.relu(self.hidden(flatten(image))))


MODELS: dict[str, Callable[[], Any]] = {"Linen": LinenMLP, "NNX": NnxMLP}


def flatten(image: jax.Array) -> jax.Array:
    """Returns one row per image, with pixels scaled from 0..16 to 0..1."""
    return (image / jnp.asarray(16, image.dtype)).reshape(image.shape[0], -1)


def loss(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Returns the mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def accuracy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Returns for each row whether the most likely class is the label."""
    return jnp.argmax(logits, -1) == label


def split_batch(batch: Mapping[str, Any]) -> tuple[tuple[Any], tuple[Any]]:
    """Splits a batch into model inputs and loss targets."""
    return (jnp.asarray(batch["image"], jnp.float32),), (batch["label"],)


def make_task(
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    split: Callable[[Any], Any] = split_batch,
) -> tekoa.TrainTask:
    """Returns a task with an endless, shuffled stream of digits."""
    data = tekoa.data.load("digits://split=train").batches(batch_size, seed=0, shuffle=2048)
    return tekoa.TrainTask(optimizer=optimizer, loss=loss, data=data, split=split)


def make_evaluation(loop: tekoa.TrainLoop, **options: Any) -> tekoa.EvalLoop:
    """Returns an evaluation of loss and accuracy on digits of other writers."""
    data = list(tekoa.data.load("digits://split=test").batches(120, epochs=1))
    return loop.evaluation({"loss": loss, "accuracy": accuracy}, data, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """The result of a recipe, as lines of a plot.

    Attributes:
        lines: Name to y values.
        x: The x values of all lines.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        is_log: Whether the y axis is logarithmic.
    """

    lines: Mapping[str, Sequence[float]]
    x: Sequence[float]
    x_label: str = "step"
    y_label: str
    is_log: bool = False


def main(run: Callable[[], Curves], about: str | None, n_devices: int | None = None) -> None:
    """Runs a recipe from the command line.

    Args:
        run: Prints results and returns curves.
        about: The text of --help.
        n_devices: Number of CPU devices that the recipe needs.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE", help="save the curves as an image (.png)")
    plot = parser.parse_args().plot
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if n_devices is not None:
        jax.config.update("jax_num_cpu_devices", n_devices)
    curves = run()
    if plot is not None:
        draw(curves, plot)
        print(f"Saved the curves to {plot}.")


def draw(curves: Curves, path: str) -> None:
    """Draws curves and saves them as an image; needs matplotlib."""
    from matplotlib import figure

    image = figure.Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = image.subplots()
    marker = "." if len(curves.x) <= 12 else ""
    for i, (name, values) in enumerate(curves.lines.items()):
        # Later lines are dashed, so that lines below them stay visible.
        style = ["-", (0, (5, 3)), (0, (2, 2)), "-."][i % 4]
        axes.plot(curves.x, values, label=name, linestyle=style, marker=marker)
    axes.set(xlabel=curves.x_label, ylabel=curves.y_label)
    if curves.is_log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    image.savefig(path, dpi=120)
