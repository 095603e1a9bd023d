"""The tasks: a model, its data, its loss and the number of steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import linen as nn

from . import data, models


def take_rows(arrays, rows):
    """Returns the examples of these numbers."""
    return tuple(a[rows] for a in arrays)


@dataclasses.dataclass(frozen=True)
class TakeWindows:
    """Returns inputs and targets of `length` tokens that start at these positions."""

    length: int

    def __call__(self, arrays, starts):
        (tokens,) = arrays
        places = starts[..., None] + np.arange(self.length)
        return tokens[places], tokens[places + 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One problem to train on. The last array of a batch is the target."""

    name: str
    about: str
    model: nn.Module
    load: Callable[[], tuple[data.Arrays, data.Arrays]]
    loss: Callable[[Any, Any], Any] = models.softmax_loss
    accuracy: Callable[[Any, Any], Any] | None = models.accuracy
    take: Callable[..., tuple[Any, ...]] = take_rows
    batch_size: int = 64
    n_steps: int = 600
    tuned_on: bool = False  # Whether the rules of `auto` were chosen with it.

    def n_examples(self, arrays: data.Arrays) -> int:
        return len(arrays[0]) - getattr(self.take, "length", 0)


def text(load: Callable[[], tuple[np.ndarray, np.ndarray]], n_test: int):
    """Returns a loader of the tokens to train on and the first of those to test on."""
    return lambda: tuple((part,) for part in (load()[0], load()[1][:n_test]))


TASKS = {
    task.name: task
    for task in (
        Task(
            name="mlp",
            about="MLP 784-256-256-10 on MNIST",
            model=models.Mlp((256, 256, 10)),
            load=data.mnist,
            batch_size=128,
            n_steps=600,
            tuned_on=True,
        ),
        Task(
            name="cnn",
            about="CNN on MNIST at 14 x 14, 12,000 images",
            model=models.Cnn(),
            load=data.small_mnist,
            n_steps=500,
            tuned_on=True,
        ),
        Task(
            name="cnn_bn",
            about="the same CNN with batch norm",
            model=models.Cnn(batch_norm=True),
            load=data.small_mnist,
            n_steps=500,
        ),
        Task(
            name="autoencoder",
            about="tanh autoencoder 784-256-64-16-64-256-784 on MNIST",
            model=models.Mlp((256, 64, 16, 64, 256, 784), nn.tanh),
            load=data.images_only,
            loss=models.pixel_loss,
            accuracy=None,
            batch_size=128,
            n_steps=600,
            tuned_on=True,
        ),
        Task(
            name="regression",
            about="MLP 40-64-64-1, inputs of scales e^N(0,1), noisy targets of rms 7",
            model=models.Mlp((64, 64, 1)),
            load=data.unscaled_regression,
            loss=models.squared_loss,
            accuracy=None,
            n_steps=2000,
            tuned_on=True,
        ),
        Task(
            name="chars",
            about="transformer, width 64, 2 layers, on Shakespeare's characters",
            model=models.Transformer(),
            load=text(data.characters, 32_001),
            take=TakeWindows(32),
            batch_size=16,
            n_steps=500,
            tuned_on=True,
        ),
        Task(
            name="lstm",
            about="LSTM of width 32 on Penn Treebank, 10,000 words",
            model=models.Lstm(),
            load=text(data.words, 10_001),
            take=TakeWindows(20),
            batch_size=8,
            n_steps=400,
        ),
        Task(
            name="vit",
            about="ViT, width 48, 2 layers, on MNIST",
            model=models.Vit(),
            load=lambda: (data.mnist()[0], tuple(a[:4000] for a in data.mnist()[1])),
            batch_size=32,
            n_steps=400,
            tuned_on=True,
        ),
        Task(
            name="words",
            about="three words of 10,000 to the next, power law, 64 classes",
            model=models.Bag(),
            load=data.next_word_classes,
            batch_size=128,
            n_steps=1000,
            tuned_on=True,
        ),
        Task(
            name="sets",
            about="deep set on the coordinates of MNIST's bright pixels",
            model=models.DeepSet(),
            load=data.point_sets,
            n_steps=600,
        ),
        Task(
            name="graphs",
            about="graph network, targets over two hops, of rms about 4",
            model=models.GraphNet(),
            load=data.graphs,
            loss=models.squared_loss,
            accuracy=None,
            batch_size=32,
            n_steps=600,
            tuned_on=True,
        ),
        Task(
            name="deep",
            about="plain MLP of 20 layers of width 64 on MNIST at 14 x 14",
            model=models.Mlp((*[64] * 20, 10)),
            load=data.small_mnist,
            n_steps=800,
            tuned_on=True,
        ),
        Task(
            name="digits",
            about="residual MLP with norms on scikit-learn's 8 x 8 digits, pixels 0..16",
            model=models.ResidualMlp(),
            load=data.sklearn_digits,
            batch_size=32,
            n_steps=300,
            tuned_on=True,
        ),
    )
}
