r"""Language model of a small decoder: rotary positions, pre-norm, gated MLP.

    tekoa train transformer_lm

trains on a small text that comes with the package, in about 45 s of CPU time, to a perplexity
of about 3.9 on lines that it has not seen (3.68 is that of the grammar which made them). Text of
words needs `--module_config.vocab_path`; without it the bytes of the files are the tokens:

    tekoa train transformer_lm --train_pattern=TRAIN.txt --valid_pattern=VALID.txt \
        --max_train_steps=300 --model_dir=DIR

comes to a cost of about 2.2 nats a byte on tiny Shakespeare (its last tenth) in as long.

Each piece of the text is predicted by itself, its first token from nothing; so every token
counts once in a score. Parameters and activations have logical axes ("vocab", "embed", "heads",
"kv", "mlp", "batch", "length"), which `LOGICAL_AXIS_RULES` maps to the axes of a mesh:
`--mesh=fsdp=8` splits the weights over 8 devices, `--mesh=model=4` each layer over 4.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import linen as nn
from ml_collections import config_dict

from tekoa.core.metrics import Mean
from tekoa.core.sharding import constrain
from tekoa.data import Source
from tekoa.estimator import adapting
from tekoa.estimator.config import UsageError
from tekoa.estimator.module import DataFacts, Experiment
from tekoa.estimator.optimizers import make_optimizer, scales_of
from tekoa.models import text

DEFAULTS = {
    "train_pattern": "sample://split=train",
    "valid_pattern": "sample://split=valid",
    "eval_pattern": "sample://split=test",
    "model_dir": "runs/transformer_lm",
    "train_batch_size": 16,
    "train_shuffle_buf": 4096,
    "max_train_steps": 400,
    "check_every_steps": 100,
}

# Logical axis to mesh axis. Rows of a batch go by the axes `data` and `fsdp`.
LOGICAL_AXIS_RULES = (
    ("vocab", "model"),
    ("heads", "model"),
    ("mlp", "model"),
    ("embed", "fsdp"),
)

# Longest period of a rotation, in tokens over 2 pi.
_BASE = 10_000.0


def get_config() -> ml_collections.ConfigDict:
    """Settings of model and optimizer.

    A `learning_rate` of None takes what is usual for the optimizer. `mlp` is "gated" or
    "plain"; `mlp_ratio` is the width of its hidden layer over that of the model. `remat` computes
    the inside of attention and MLP again in the backward pass instead of keeping it.
    """
    return ml_collections.ConfigDict(
        {
            "seq_length": 64,
            "vocab_path": config_dict.placeholder(str),
            "n_layers": 2,
            "width": 128,
            "n_heads": 4,
            "mlp": "gated",
            "mlp_ratio": 3.0,
            "dropout": 0.1,
            "remat": False,
            "opt_config": {
                "optimizer": "adam",
                "learning_rate": config_dict.placeholder(float),
                "momentum": 0.9,
                "beta": 0.99,
                "weight_decay": 0.01,
                "groups": config_dict.placeholder(str),
            },
            "lora": adapting.settings(),
        }
    )


def open_data(config: Any, pattern: str, *, train: bool) -> Source:
    """Opens text as a stream of tokens; words with a vocabulary, else bytes."""
    return text.open_text(pattern, config.vocab_path, config.seq_length, train=train)


def experiment(config: Any, data: DataFacts) -> Experiment:
    """The decoder for this vocabulary."""
    _check(config)
    vocab_size, start_id = text.tokens_of(data.info)
    model = TransformerLM(
        vocab_size,
        n_layers=config.n_layers,
        width=config.width,
        n_heads=config.n_heads,
        mlp_width=round(config.width * config.mlp_ratio),
        is_gated=config.mlp == "gated",
        dropout=config.dropout,
        remat=config.remat,
    )

    inputs = functools.partial(shifted, start_id=start_id)
    model = adapting.adapted(model, config, inputs(data.sample))

    def optimizer() -> optax.GradientTransformation:
        return make_optimizer(
            config.opt_config,
            n_batches=max(1.0, (data.n_examples or 1) / data.batch_size),
            find_scales=lambda: scales_of(model, loss, data.sample, split=found.split),
        )

    found = Experiment(
        model=model,
        loss=loss,
        optimizer=optimizer,
        inputs=inputs,
        metrics={"cost": text.token_losses, "mrr": text.reciprocal_ranks},
        finish=text.with_perplexity,
    )
    return found


def _check(config: Any) -> None:
    def refuse(name: str, wanted: str) -> None:
        raise UsageError(f"--module_config.{name} must be {wanted}, got {config[name]!r}.")

    text.check_settings(config, "", counts=("n_layers", "width", "n_heads"), rates=("dropout",))
    if config.width % (2 * config.n_heads):
        refuse("width", f"a multiple of 2 * n_heads = {2 * config.n_heads}")
    text.check_choice(config.mlp, "mlp", ("gated", "plain"))
    if not config.mlp_ratio > 0:
        refuse("mlp_ratio", "above 0")


def loss(logits: jax.Array, batch: Mapping[str, Any]) -> tuple[Mean, dict[str, Mean]]:
    """Mean cross entropy of the tokens, also as the metric `cost`."""
    cost = text.token_losses(logits, batch)
    return cost, {"cost": cost}


def shifted(batch: Mapping[str, Any], *, start_id: int) -> jax.Array:
    """What the model reads: the token before each, the start token before the first."""
    tokens_BxL = jnp.asarray(batch["tokens"])
    return jnp.pad(tokens_BxL[:, :-1], ((0, 0), (1, 0)), constant_values=start_id)


class TransformerLM(nn.Module):
    """Predicts the token after each token of a row from those up to it.

    Attributes:
        vocab_size: Number of tokens.
        n_layers: Blocks of attention and MLP.
        width: Width of the residual stream.
        n_heads: Attention heads; each has width / n_heads entries.
        mlp_width: Width of the MLP's hidden layer.
        is_gated: Whether the hidden layer is multiplied by a gate.
        dropout: Of the embedding and of what each half block adds.
        remat: Whether the inside of a half block is computed again in the backward pass.
    """

    vocab_size: int
    n_layers: int
    width: int
    n_heads: int
    mlp_width: int
    is_gated: bool = True
    dropout: float = 0.0
    remat: bool = False

    @nn.compact
    def __call__(self, tokens_BxL: jax.Array, train: bool = False) -> jax.Array:
        """Gives logits (rows, length, vocabulary)."""
        drop = nn.Dropout(self.dropout, deterministic=not train)
        table = _param(self, "embedding", (self.vocab_size, self.width), ("vocab", "embed"), 1)
        # Rows are looked up in a table of which each device has whole rows.
        rows = constrain(table, "vocab", None)
        # The table has the scale of the output layer; its rows enter at unit size.
        x = drop(rows[tokens_BxL] * math.sqrt(self.width))
        x = constrain(x, "batch", "length", "embed")
        for i in range(self.n_layers):
            attention = nn.remat(Attention) if self.remat else Attention
            mlp = nn.remat(MLP) if self.remat else MLP
            halves = (
                attention(self.n_heads, name=f"attention_{i}"),
                mlp(self.mlp_width, self.is_gated, name=f"mlp_{i}"),
            )
            for half in halves:
                x = x + drop(half(x))
                x = constrain(x, "batch", "length", "embed")
        x = RMSNorm(name="norm")(x)
        logits = jnp.einsum("BLD,VD->BLV", x, table)
        return constrain(logits, "batch", "length", "vocab")


class Attention(nn.Module):
    """Self-attention of each token to those up to it, after normalization."""

    n_heads: int

    @nn.compact
    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Gives what is to be added to x."""
        width, length = x_BxLxD.shape[-1], x_BxLxD.shape[1]
        size = width // self.n_heads
        x = RMSNorm(name="norm")(x_BxLxD)
        shape, axes = (width, self.n_heads, size), ("embed", "heads", "kv")
        q, k, v = (
            constrain(
                jnp.einsum("BLD,DHK->BLHK", x, _param(self, name, shape, axes, 0)),
                *("batch", "length", "heads", "kv"),
            )
            for name in ("query", "key", "value")
        )
        positions = jnp.arange(length)
        scores = jnp.einsum("BQHK,BSHK->BHQS", rotated(q, positions), rotated(k, positions))
        is_seen = positions[:, None] >= positions[None]
        scores = jnp.where(is_seen, scores.astype(jnp.float32) / math.sqrt(size), -jnp.inf)
        weights = nn.softmax(scores).astype(v.dtype)
        mixed = jnp.einsum("BHQS,BSHK->BQHK", weights, v)
        out = _param(self, "out", (self.n_heads, size, width), ("heads", "kv", "embed"), (0, 1))
        return jnp.einsum("BLHK,HKD->BLD", mixed, out)


def rotated(x_BxLxHxK: jax.Array, positions_L: jax.Array) -> jax.Array:
    """Turns pairs of entries by angles in proportion to the position.

    The product of two vectors so turned depends on the distance of their positions alone.
    """
    half = x_BxLxHxK.shape[-1] // 2
    rates = _BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_L.astype(jnp.float32)[:, None, None] * rates
    cos, sin = (f(angles).astype(x_BxLxHxK.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BxLxHxK, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class MLP(nn.Module):
    """Two layers of each token by itself, after normalization."""

    hidden_width: int
    is_gated: bool

    @nn.compact
    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Gives what is to be added to x."""
        width = x_BxLxD.shape[-1]
        x = RMSNorm(name="norm")(x_BxLxD)
        shape, axes = (width, self.hidden_width), ("embed", "mlp")
        hidden = nn.silu(x @ _param(self, "in", shape, axes, 0))
        if self.is_gated:
            hidden = hidden * (x @ _param(self, "gate", shape, axes, 0))
        hidden = constrain(hidden, "batch", "length", "mlp")
        return hidden @ _param(self, "out", shape[::-1], axes[::-1], 0)


class RMSNorm(nn.Module):
    """Brings each token's vector to unit size, times a learned scale."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Gives x normalized along its last axis."""
        init: Any = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        scale = self.param("scale", init, (x.shape[-1],))
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


def _param(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    contracted: int | tuple[int, ...],
) -> jax.Array:
    """A matrix with logical axes, drawn so that what is contracted with it keeps its size."""
    contracted = (contracted,) if isinstance(contracted, int) else contracted
    stddev = math.prod(shape[axis] for axis in contracted) ** -0.5
    # `param` gives the array without the box of its axes, which its type does not tell.
    init: Any = nn.with_logical_partitioning(nn.initializers.normal(stddev), axes)
    return module.param(name, init, shape)
