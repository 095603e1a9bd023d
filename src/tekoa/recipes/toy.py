"""What the recipes share: one small network in Linen and in NNX, the digits, a command line.

None of it belongs to a recipe: with a model and data of one's own it falls away.
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
        """Gives logits (rows, classes)."""
        x = nn.relu(nn.Dense(N_HIDDEN, name="hidden")(as_rows(image)))
        return nn.Dense(N_CLASSES, name="out")(x)


class NnxMLP(nnx.Module):
    """The same two dense layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(64, N_HIDDEN, rngs=rngs)
        self.out = nnx.Linear(N_HIDDEN, N_CLASSES, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Gives logits (rows, classes)."""
        return self.out(nnx.relu(self.hidden(as_rows(image))))


MODELS: dict[str, Callable[[], Any]] = {"Linen": LinenMLP, "NNX": NnxMLP}


def as_rows(image: jax.Array) -> jax.Array:
    """Pixels from 0 to 16 as rows of numbers from 0 to 1."""
    scaled = image / jnp.asarray(16, image.dtype)
    return scaled.reshape(image.shape[0], -1)


def loss(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def accuracy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Whether each row's best class is its label."""
    return jnp.argmax(logits, -1) == label


def as_pair(batch: Mapping[str, Any]) -> tuple[tuple[Any], tuple[Any]]:
    """Tells the inputs of a batch from its targets."""
    return (jnp.asarray(batch["image"], jnp.float32),), (batch["label"],)


def make_task(
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    split: Callable[[Any], Any] = as_pair,
) -> tekoa.TrainTask:
    """Digits to learn, shuffled, without an end."""
    data = tekoa.data.load("digits://split=train").batches(batch_size, seed=0, shuffle=2048)
    return tekoa.TrainTask(optimizer=optimizer, loss=loss, data=data, split=split)


def make_evaluation(
    loop: tekoa.TrainLoop, split: Callable[[Any], Any] = as_pair, **options: Any
) -> tekoa.EvalLoop:
    """Measures loss and accuracy on digits of other writers."""
    data = list(tekoa.data.load("digits://split=test").batches(120, epochs=1))
    measures = {"loss": loss, "accuracy": accuracy}
    task = tekoa.EvalTask(metrics=measures, data=data, split=split)
    return tekoa.EvalLoop(task, init=loop.model_fns, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """What a recipe found: lines to draw.

    Attributes:
        lines: Name to values.
        x: Where the values are.
        x_label: What x counts.
        y_label: What the values are.
        is_log: Whether y is drawn on a logarithmic scale.
    """

    lines: Mapping[str, Sequence[float]]
    x: Sequence[float]
    x_label: str = "step"
    y_label: str
    is_log: bool = False


def main(run: Callable[[], Curves], about: str | None, n_devices: int | None = None) -> None:
    """Runs a recipe from the command line.

    Args:
        run: Prints what it finds, and gives its curves.
        about: The text of --help.
        n_devices: As many CPU devices as the recipe needs.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE", help="write the curves as a picture, say a .png")
    plot = parser.parse_args().plot
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if n_devices is not None:
        jax.config.update("jax_num_cpu_devices", n_devices)
    curves = run()
    if plot is not None:
        draw(curves, plot)
        print(f"The curves are in {plot}.")


def draw(curves: Curves, path: str) -> None:
    """Draws curves into a file; needs matplotlib."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = picture.subplots()
    for i, (name, values) in enumerate(curves.lines.items()):
        # Lines that fall together stay visible: the later ones are dashed.
        style = ["-", (0, (5, 3)), (0, (2, 2)), "-."][i % 4]
        axes.plot(curves.x, values, label=name, linestyle=style, marker="." if _few(curves) else "")
    axes.set(xlabel=curves.x_label, ylabel=curves.y_label)
    if curves.is_log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.savefig(path, dpi=120)


def _few(curves: Curves) -> bool:
    return len(curves.x) <= 12
