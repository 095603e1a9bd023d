"""The models of bench/loop.py, and their loops in other libraries."""

import logging
import os
import warnings

import numpy as np
import optax
from flax import linen as nn

BATCH = 32


class Mlp(nn.Module):
    """784-64-10."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


class Cnn(nn.Module):
    """Two convolutions and two dense layers, for 28x28 images."""

    @nn.compact
    def __call__(self, x):
        for n in (32, 64):
            x = nn.avg_pool(nn.relu(nn.Conv(n, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


class Transformer(nn.Module):
    """Four layers of width 256 over 32 tokens."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 256)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(4):
            x += nn.SelfAttention(4)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(256)(nn.LayerNorm()(x))


def loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def arrays(name, n=4096):
    """Returns NumPy inputs and targets of a model."""
    rng = np.random.default_rng(0)
    if name == "transformer":
        tokens = rng.integers(0, 256, (n, 33)).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    x = rng.normal(size=(n, 28, 28, 1)).astype(np.float32)
    return x, rng.integers(0, 10, n).astype(np.int32)


def shuffled(x, y, seed=0):
    """Yields batches forever, as a hand-written loop would draw them."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            yield x[rows], y[rows]


MODELS = {"mlp": Mlp, "cnn": Cnn, "transformer": Transformer}


def keras_fit(name, n_steps):
    """Returns `fit` of Keras 3 on JAX; None if it is not installed or lacks the model."""
    os.environ["KERAS_BACKEND"] = "jax"
    try:
        import keras
    except ImportError:
        return None
    layers = keras.layers
    if name == "mlp":
        body = [layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10)]
    elif name == "cnn":
        body = [
            *(
                layer
                for n in (32, 64)
                for layer in (
                    layers.Conv2D(n, 3, padding="same", activation="relu"),
                    layers.AveragePooling2D(),
                )
            ),
            layers.Flatten(),
            layers.Dense(256, "relu"),
            layers.Dense(10),
        ]
    else:
        return None
    model = keras.Sequential([keras.Input((28, 28, 1)), *body])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = arrays(name, n_steps * BATCH)
    return lambda: model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)


def lightning_fit(name, n_steps):
    """Returns `Trainer.fit` of Lightning; None if not installed or without the model."""
    try:
        import lightning
        import torch
    except ImportError:
        return None
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    nn_ = torch.nn
    if name == "mlp":
        body = [nn_.Flatten(), nn_.Linear(784, 64), nn_.ReLU(), nn_.Linear(64, 10)]
    elif name == "cnn":
        body = [
            *(nn_.Conv2d(1, 32, 3, padding=1), nn_.ReLU(), nn_.AvgPool2d(2)),
            *(nn_.Conv2d(32, 64, 3, padding=1), nn_.ReLU(), nn_.AvgPool2d(2)),
            *(nn_.Flatten(), nn_.Linear(3136, 256), nn_.ReLU(), nn_.Linear(256, 10)),
        ]
    else:
        return None

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn_.Sequential(*body)

        def training_step(self, batch, _):
            return nn_.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    x, y = arrays(name, n_steps * BATCH)
    data = torch.utils.data.TensorDataset(
        torch.tensor(x.transpose(0, 3, 1, 2)), torch.tensor(y.astype(np.int64))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    module = Module()

    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_epochs=1,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, loader)

    return run
