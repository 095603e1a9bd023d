r"""Language model with one LSTM layer, for text of words or bytes.

    tekoa train lstm_lm

trains on a small text that is part of the package, in about 70 s of CPU time, to a perplexity
of about 3.7 on held-out lines (the grammar that generated them has 3.68). On the Penn Treebank,
with the settings of JEstimator:

    tekoa train lstm_lm --train_pattern=ptb.train.txt --module_config.vocab_path=vocab.txt \
        --train_batch_size=64 --train_consecutive=113 --train_shuffle_buf=4096 \
        --valid_pattern=ptb.valid.txt --max_train_steps=200000 --model_dir=DIR \
        --module_config.opt_config.optimizer=amos --module_config.opt_config.learning_rate=0.01 \
        --module_config.opt_config.beta=0.98 --module_config.opt_config.momentum=0.0
    tekoa eval lstm_lm --eval_pattern=ptb.valid.txt --eval_batch_size=1 --model_dir=DIR \
        --module_config.vocab_path=vocab.txt

Parameters and arithmetic are those of JEstimator's LSTM, so that its checkpoints load.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import linen as nn
from ml_collections import config_dict

import tekoa
from tekoa import Mean
from tekoa.data import Source
from tekoa.estimator import DataFacts, Experiment, lora, make_optimizer
from tekoa.models import text

# Evaluation reads the text as a single row; the carry connects its sequences.
ALWAYS = {"valid_batch_size": 1, "eval_batch_size": 1}
DEFAULTS = {
    **ALWAYS,
    "train_pattern": "sample://split=train",
    "valid_pattern": "sample://split=valid",
    "eval_pattern": "sample://split=test",
    "model_dir": "runs/lstm_lm",
    "train_batch_size": 16,
    "train_consecutive": 8,
    "train_shuffle_buf": 4096,
    "max_train_steps": 200,
    "check_every_steps": 50,
}

ETA = {
    "embed/embedding": "SHAPE[1] ** -0.25",
    "lstm/normalize/shift": "0.5 * (SHAPE[0] / 2) ** -0.25",
    "lstm/cell/core/kernel": "SHAPE[0] ** -0.25",
    "lstm/cell/core/bias": 0.5,
    "lstm/cell/normalize/shift": 0.5,
    "lstm/cell/out/kernel": "(SHAPE[0] * SHAPE[1]) ** -0.25",
    "lstm/cell/out/bias": "0.5 * SHAPE[0] ** -0.25",
    "bias": 0.5,
}
SLOTS = {
    "embed/embedding": "(SHAPE[0], 1)",
    "lstm/cell/core/kernel": "(1, SHAPE[1], SHAPE[2])",
    "lstm/cell/out/kernel": "(1, SHAPE[1])",
    ".*": (),
}


def get_config() -> ml_collections.ConfigDict:
    """Returns the settings of model and optimizer.

    The optimizer "auto" needs no settings; those of `opt_config` are for others, such as "adam". A
    `learning_rate` of None means the default of the optimizer; for "adam" it is 5e-4, as in
    JEstimator. `scales` selects the scales for "amos": "hand" uses the table of this file, "found"
    finds them by analysing the model. `label_smoothing` and `z_loss` are those of
    `tekoa.cross_entropy`, in training only.
    """
    return ml_collections.ConfigDict(
        {
            "seq_length": 64,
            "vocab_path": config_dict.placeholder(str),
            "label_smoothing": 0.0,
            "z_loss": 0.0,
            "model_config": {
                "hidden_size": 256,
                "memory_size": 1024,
                "forget_gate_bias": 1.0,
                "hidden_dropout_rate": 0.55,
                "memory_dropout_rate": 0.1,
            },
            "opt_config": {
                "optimizer": "auto",
                "learning_rate": config_dict.placeholder(float),
                "momentum": 0.9,
                "beta": 0.99,
                "weight_decay": 0.01,
                "scales": "hand",
                "groups": config_dict.placeholder(str),
            },
            "lora": lora.settings(),
        }
    )


def open_data(config: Any, pattern: str, *, train: bool) -> Source:
    """Opens text as a stream of tokens: words if there is a vocabulary, else bytes."""
    return text.open_text(pattern, config.vocab_path, config.seq_length, train=train)


def experiment(config: Any, data: DataFacts) -> Experiment:
    """Returns the LSTM for this vocabulary."""
    text.check_settings(
        config.model_config,
        "model_config.",
        counts=("hidden_size", "memory_size"),
        rates=("hidden_dropout_rate", "memory_dropout_rate"),
    )
    text.check_loss_settings(config)
    text.check_rate(config.opt_config)
    vocab_size, start_id = text.tokens_of(data.info)
    plain = LstmLM(vocab_size, start_id, **config.model_config)
    model = lora.adapted(plain, config, inputs(data.sample))

    token_loss = text.training_loss(label_smoothing=config.label_smoothing, z_loss=config.z_loss)

    def loss(logits: jax.Array, batch: Mapping[str, Any]) -> tuple[Mean, dict[str, Mean]]:
        """Returns the sum divided by the root of the number of tokens, and the mean to report.

        With gradient accumulation, this sees only a part of the rows. The counts of all parts must
        add up to the root of the number of tokens.
        """
        (total, count), metrics = token_loss(logits, batch)
        count = jnp.sqrt(count * (len(logits) / data.batch_size))
        return Mean(total, count), {**metrics, "loss": metrics["cost"]}

    def optimizer() -> optax.GradientTransformation:
        scales = config.opt_config.scales
        text.check_choice(scales, "opt_config.scales", ("hand", "found"))
        # The tables of this file describe weights, not adapters.
        use_tables = scales == "hand" and model is plain
        return make_optimizer(
            config.opt_config,
            n_batches=data.n_batches,
            find_scales=lambda: tekoa.find_scales(model, loss, data.sample, split=result.split),
            eta=ETA if use_tables else None,
            slot_shape=SLOTS if use_tables else None,
            clip_value=1.0,
        )

    result = Experiment(
        model=model,
        loss=loss,
        optimizer=optimizer,
        inputs=inputs,
        metrics=text.of_one_row({"cost": text.token_losses, "mrr": text.reciprocal_ranks}),
        finish=text.with_perplexity,
        text=text.text_fns(
            data.info,
            config.seq_length,
            # The model puts the start token before its inputs, and predicts those.
            lambda tokens: jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))),
        ),
    )
    return result


def inputs(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the inputs: the tokens and, if present, which rows start a new text."""
    return tuple(batch[name] for name in ("tokens", "is_first") if name in batch)


class LstmLM(nn.Module):
    """Predicts each token of a row from those before it, including earlier batches.

    The last token, the recurrent output and the memory are kept in the collection "carry".

    Attributes:
        vocab_size: Number of tokens.
        start_id: The token before the first one.
        hidden_size: Width of the embedding and of the recurrent output.
        memory_size: Width of the memory.
        forget_gate_bias: Bias of the forget gate; higher values keep more of the memory.
        hidden_dropout_rate: Dropout of the input and the output of the cell.
        memory_dropout_rate: Dropout of the memory readout; one mask per sequence.
    """

    vocab_size: int
    start_id: int
    hidden_size: int = 256
    memory_size: int = 1024
    forget_gate_bias: float = 1.0
    hidden_dropout_rate: float = 0.55
    memory_dropout_rate: float = 0.1

    @nn.compact
    def __call__(
        self, tokens_BxL: jax.Array, is_first_B: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        """Returns logits (rows, length, vocabulary) for the given tokens.

        Args:
            tokens_BxL: The tokens to predict.
            is_first_B: True for rows that do not continue the previous batch, or one value for
                all rows. None: a single row outside of training continues, others do not.
            train: Whether to use dropout.
        """
        n_rows = tokens_BxL.shape[0]
        prev = self.variable("carry", "prev", jnp.full, n_rows, self.start_id, jnp.int32)
        recurrent = self.variable("carry", "recurrent", jnp.zeros, (n_rows, self.hidden_size))
        memory = self.variable("carry", "memory", jnp.zeros, (n_rows, self.memory_size))
        if is_first_B is None:
            is_first_B = jnp.asarray(train or n_rows > 1)
        keep_B = jnp.broadcast_to(~jnp.asarray(is_first_B, bool), n_rows)
        first_B = jnp.where(keep_B, prev.value, self.start_id)
        init = nn.initializers.truncated_normal(self.hidden_size**-0.5)
        embed = nn.Embed(self.vocab_size, self.hidden_size, embedding_init=init, name="embed")
        x_LxBxH = embed(jnp.concatenate([first_B[None], tokens_BxL.T[:-1]]))
        rates = self.hidden_dropout_rate, self.memory_dropout_rate
        layer = LstmLayer(self.forget_gate_bias, *rates, name="lstm")
        start = tuple(jnp.where(keep_B[:, None], x.value, 0) for x in (recurrent, memory))
        last, out_LxBxH = layer(start, x_LxBxH, train)
        if not self.is_initializing():
            prev.value, (recurrent.value, memory.value) = tokens_BxL[:, -1], last
        bias = self.param("bias", nn.initializers.zeros, (self.vocab_size,))
        return embed.attend(jnp.swapaxes(out_LxBxH, 0, 1)) + bias


class LstmLayer(nn.Module):
    """Runs the cell over a sequence; attributes as for `LstmLM`."""

    forget_gate_bias: float
    hidden_dropout_rate: float
    memory_dropout_rate: float

    def setup(self):
        self.normalize, self.cell = ShiftNorm(), LstmCell(self.forget_gate_bias)
        self.hidden_dropout = nn.Dropout(self.hidden_dropout_rate)
        self.memory_dropout = nn.Dropout(self.memory_dropout_rate)

    def __call__(
        self, start: tuple[jax.Array, ...], x_LxBxH: jax.Array, train: bool
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Returns the last recurrent output and memory, and all outputs (length, rows, hidden)."""
        mask_BxM = self.memory_dropout(jnp.ones_like(start[1]), deterministic=not train)

        def run_cell(layer: "LstmLayer", carry: tuple[jax.Array, ...], x_BxH: jax.Array):
            x = layer.normalize(jnp.concatenate([carry[0], x_BxH], -1))
            x = layer.hidden_dropout(x, deterministic=not train)
            out, memory = layer.cell(x, carry[1], mask_BxM)
            return (out, memory), out

        rngs: Any = {"params": False, "dropout": True}
        scan = nn.scan(run_cell, variable_broadcast="params", split_rngs=rngs)
        last, out_LxBxH = scan(self, start, x_LxBxH)
        return last, self.hidden_dropout(out_LxBxH, deterministic=not train)


class LstmCell(nn.Module):
    """One time step: a gated memory whose update is bounded by the gate."""

    forget_gate_bias: float

    @nn.compact
    def __call__(
        self, x: jax.Array, memory: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output, half as wide as x, and the next memory."""
        init = nn.initializers.truncated_normal(x.shape[-1] ** -0.5)
        core = nn.DenseGeneral((4, memory.shape[-1]), kernel_init=init, name="core")
        a, b, g, o = jnp.moveaxis(core(x), -2, 0)
        gate = nn.sigmoid(self.forget_gate_bias - g)
        limit = 1 / (1 + math.exp(self.forget_gate_bias))
        update = jnp.clip(limit * jnp.tanh(b), -gate, gate) * 2 * nn.silu(a)
        memory = memory * (1 - gate) + update
        read = ShiftNorm(name="normalize")(memory) * 2 * nn.sigmoid(o) * mask
        out = nn.Dense(x.shape[-1] // 2, kernel_init=nn.initializers.zeros, name="out")
        return out(read), memory


class ShiftNorm(nn.Module):
    """Subtracts a learned shift and the mean, and limits the RMS to size**-0.25."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x normalized along its last axis."""
        x = x - self.param("shift", nn.initializers.zeros, x.shape[-1:])
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.maximum(square * math.sqrt(x.shape[-1]), 1.0))
