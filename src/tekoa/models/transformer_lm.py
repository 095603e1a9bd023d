r"""Language model with a small Transformer decoder: rotary positions, pre-norm, gated MLP.

    tekoa train transformer_lm

trains on a small text that is part of the package, in about 45 s of CPU time, to a perplexity
of about 3.9 on held-out lines (the grammar that generated them has 3.68). Tokens are words if
`--module_config.vocab_path` is set (or pieces of words, if it is a tokenizer.json), else the bytes
of the files:

    tekoa train transformer_lm --train_pattern=TRAIN.txt --valid_pattern=VALID.txt \
        --max_train_steps=300 --model_dir=DIR

reaches a cost of about 2.2 nats per byte on the last tenth of tiny Shakespeare in the same time.

Each sequence of the text is predicted independently, its first token without context, so every
token counts once in a score. With `--module_config.pack=True`, each line is a document: a sequence
has several of them, and attention does not cross their ends.

Parameters and activations have logical axes ("vocab", "embed", "heads", "kv", "mlp", "batch",
"length"), which `LOGICAL_AXIS_RULES` maps to the axes of a mesh: `--mesh=fsdp=8` splits the weights
over 8 devices, `--mesh=model=4` each layer over 4.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import linen as nn
from ml_collections import config_dict

import tekoa
from tekoa.data import Source
from tekoa.estimator import DataFacts, Experiment, UsageError, lora, make_optimizer
from tekoa.models import text
from tekoa.sharding import constrain

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

# Logical axis to mesh axis. The rows of a batch are split over `data` and `fsdp`.
LOGICAL_AXIS_RULES = (("vocab", "model"), ("heads", "model"), ("mlp", "model"), ("embed", "fsdp"))


def get_config() -> ml_collections.ConfigDict:
    """Returns the settings of model and optimizer.

    The optimizer "auto" needs no settings; those of `opt_config` are for others, such as "adam". A
    `learning_rate` of None means the default of the optimizer. `mlp` is "gated" or "plain";
    `mlp_ratio` is the width of its hidden layer divided by the width of the model. `remat`
    recomputes the inside of attention and MLP in the backward pass instead of storing it.
    `stochastic_depth` is the rate at which attention and MLP of the last block are left out in
    training, each by row; earlier blocks have proportionally lower rates. `label_smoothing` and
    `z_loss` are those of `tekoa.cross_entropy`, in training only.
    """
    return ml_collections.ConfigDict(
        {
            "seq_length": 64,
            "vocab_path": config_dict.placeholder(str),
            "pack": False,
            "n_layers": 2,
            "width": 128,
            "n_heads": 4,
            "mlp": "gated",
            "mlp_ratio": 3.0,
            "dropout": 0.1,
            "stochastic_depth": 0.0,
            "label_smoothing": 0.0,
            "z_loss": 0.0,
            "remat": False,
            "opt_config": {
                "optimizer": "auto",
                "learning_rate": config_dict.placeholder(float),
                "momentum": 0.9,
                "beta": 0.99,
                "weight_decay": 0.01,
                "groups": config_dict.placeholder(str),
            },
            "lora": lora.settings(),
        }
    )


def open_data(config: Any, pattern: str, *, train: bool) -> Source:
    """Opens text as tokens: words if there is a vocabulary, else bytes."""
    return text.open_text(
        pattern, config.vocab_path, config.seq_length, train=train, pack=config.pack
    )


def experiment(config: Any, data: DataFacts) -> Experiment:
    """Returns the decoder for this vocabulary."""
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
        stochastic_depth=config.stochastic_depth,
        remat=config.remat,
    )

    inputs = functools.partial(model_inputs, start_id=start_id)
    loss = text.training_loss(label_smoothing=config.label_smoothing, z_loss=config.z_loss)
    model = lora.adapted(model, config, inputs(data.sample))

    def optimizer() -> optax.GradientTransformation:
        return make_optimizer(
            config.opt_config,
            n_batches=data.n_batches,
            find_scales=lambda: tekoa.find_scales(model, loss, data.sample, split=result.split),
        )

    result = Experiment(
        model=model,
        loss=loss,
        optimizer=optimizer,
        inputs=inputs,
        metrics={"cost": text.token_losses, "mrr": text.reciprocal_ranks},
        finish=text.with_perplexity,
        text=text.text_fns(data.info, config.seq_length),
    )
    return result


def _check(config: Any) -> None:
    rates = ("dropout", "stochastic_depth")
    text.check_settings(config, "", counts=("n_layers", "width", "n_heads"), rates=rates)
    text.check_loss_settings(config)
    if config.width % (n := 2 * config.n_heads):
        raise UsageError(
            f"--module_config.width must be a multiple of 2 * n_heads = {n}, got {config.width!r}."
        )
    text.check_choice(config.mlp, "mlp", ("gated", "plain"))
    if not config.mlp_ratio > 0:
        raise UsageError(f"--module_config.mlp_ratio must be above 0, got {config.mlp_ratio!r}.")
    text.check_rate(config.opt_config)


def model_inputs(batch: Mapping[str, Any], *, start_id: int) -> Any:
    """Returns the inputs of the model: the tokens shifted right, after the start token.

    In a batch of packed documents, each document starts with that token, and the segments are
    the second input.
    """
    tokens_BxL = jnp.asarray(batch["tokens"])
    shifted_BxL = jnp.pad(tokens_BxL[:, :-1], ((0, 0), (1, 0)), constant_values=start_id)
    if "segments" not in batch:
        return shifted_BxL
    is_first = jnp.asarray(batch["positions"]) == 0
    return jnp.where(is_first, start_id, shifted_BxL), jnp.asarray(batch["segments"])


class TransformerLM(nn.Module):
    """Predicts the next token at each position of a row.

    Attributes:
        vocab_size: Number of tokens.
        n_layers: Number of blocks, each attention and MLP.
        width: Width of the residual stream.
        n_heads: Attention heads, each of size width / n_heads.
        mlp_width: Width of the MLP's hidden layer.
        is_gated: Whether the hidden layer is multiplied by a gate.
        dropout: Dropout rate of the embedding and of the output of attention and MLP.
        remat: Whether to recompute the inside of attention and MLP in the backward pass.
        stochastic_depth: The rate at which attention and MLP of the last block are left out, each
            by row; the rates of the blocks before it grow to it linearly.
    """

    vocab_size: int
    n_layers: int
    width: int
    n_heads: int
    mlp_width: int
    is_gated: bool = True
    dropout: float = 0.0
    remat: bool = False
    stochastic_depth: float = 0.0

    @nn.compact
    def __call__(
        self, tokens_BxL: jax.Array, segments_BxL: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        """Returns logits (rows, length, vocabulary); a token sees only those of its segment."""
        drop = nn.Dropout(self.dropout, deterministic=not train)
        table = _param(self, "embedding", "embed", vocab=self.vocab_size, embed=self.width)
        # The table has the scale of the output layer; as inputs, its rows need unit size.
        # The lookup needs complete rows on each device.
        x = drop(constrain(table, "vocab", None)[tokens_BxL] * math.sqrt(self.width))
        x = constrain(x, "batch", "length", "embed")
        attention, mlp = Attention, MLP
        if self.remat:
            attention, mlp = nn.remat(Attention), nn.remat(MLP)
        for i in range(self.n_layers):
            thin = drop
            if self.stochastic_depth:
                thin = _and_rows(drop, self.stochastic_depth * (i + 1) / self.n_layers, train)
            x = x + thin(attention(self.n_heads, name=f"attention_{i}")(x, segments_BxL))
            x = constrain(x, "batch", "length", "embed")
            x = x + thin(mlp(self.mlp_width, self.is_gated, name=f"mlp_{i}")(x))
            x = constrain(x, "batch", "length", "embed")
        logits = jnp.einsum("BLD,VD->BLV", RMSNorm(name="norm")(x), table)
        return constrain(logits, "batch", "length", "vocab")


def _and_rows(drop: nn.Module, rate: float, train: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns dropout that also leaves out rows, at a rate of their own."""
    skip = nn.Dropout(rate, broadcast_dims=(1, 2), deterministic=not train)
    return lambda x: skip(drop(x))


class Attention(nn.Module):
    """Causal self-attention, after normalization."""

    n_heads: int

    @nn.compact
    def __call__(self, x_BxLxD: jax.Array, segments_BxL: jax.Array | None = None) -> jax.Array:
        """Returns the update to be added to x; attention stays inside segments, if any."""
        width, length = x_BxLxD.shape[-1], x_BxLxD.shape[1]
        size = width // self.n_heads
        x = RMSNorm(name="norm")(x_BxLxD)
        sizes = {"embed": width, "heads": self.n_heads, "kv": size}
        kernels = [_param(self, name, "embed", **sizes) for name in ("query", "key", "value")]
        q, k, v = (
            constrain(jnp.einsum("BLD,DHK->BLHK", x, w), "batch", "length", "heads", "kv")
            for w in kernels
        )
        # Only distances count, so positions need not start over in a segment.
        positions = jnp.arange(length)
        scores = jnp.einsum("BQHK,BSHK->BHQS", rotate(q, positions), rotate(k, positions))
        is_visible = positions[:, None] >= positions[None]
        if segments_BxL is not None:
            is_visible &= (segments_BxL[:, :, None] == segments_BxL[:, None])[:, None]
        scores = jnp.where(is_visible, scores.astype(jnp.float32) / math.sqrt(size), -jnp.inf)
        weights = nn.softmax(scores).astype(v.dtype)
        mixed = jnp.einsum("BHQS,BSHK->BQHK", weights, v)
        out = _param(self, "out", "heads kv", heads=self.n_heads, kv=size, embed=width)
        return jnp.einsum("BLHK,HKD->BLD", mixed, out)


def rotate(x_BxLxHxK: jax.Array, positions_L: jax.Array) -> jax.Array:
    """Rotates pairs of entries by angles proportional to the position.

    The product of two rotated vectors depends only on the distance of their positions. The longest
    wavelength is 2 pi 10,000 tokens.
    """
    half = x_BxLxHxK.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_L.astype(jnp.float32)[:, None, None] * rates
    cos, sin = (f(angles).astype(x_BxLxHxK.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BxLxHxK, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class MLP(nn.Module):
    """Two dense layers applied to each token, after normalization."""

    hidden_width: int
    is_gated: bool

    @nn.compact
    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Returns the update to be added to x."""
        width = x_BxLxD.shape[-1]
        x = RMSNorm(name="norm")(x_BxLxD)
        sizes = {"embed": width, "mlp": self.hidden_width}
        hidden = nn.silu(x @ _param(self, "in", "embed", **sizes))
        if self.is_gated:
            hidden = hidden * (x @ _param(self, "gate", "embed", **sizes))
        hidden = constrain(hidden, "batch", "length", "mlp")
        return hidden @ _param(self, "out", "mlp", mlp=self.hidden_width, embed=width)


class RMSNorm(nn.Module):
    """Scales the vector of each token to unit RMS, times a learned scale."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x normalized along its last axis."""
        init: Any = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        scale = self.param("scale", init, (x.shape[-1],))
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


def _param(module: nn.Module, name: str, contracted: str, **sizes: int) -> jax.Array:
    """Creates a weight from the sizes of its logical axes; it keeps the size of its input."""
    stddev = math.prod(sizes[axis] for axis in contracted.split()) ** -0.5
    # `param` returns the array without the box of its axes, contrary to its type.
    init: Any = nn.with_logical_partitioning(nn.initializers.normal(stddev), tuple(sizes))
    return module.param(name, init, tuple(sizes.values()))
