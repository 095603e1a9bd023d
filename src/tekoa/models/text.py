"""Shared by the language models: opening text, checking settings, scoring tokens."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tekoa import Mean, TextFns, cross_entropy, data
from tekoa.data import DataError, Info, Source
from tekoa.estimator import UsageError
from tekoa.models import sample_text

SAMPLE = "sample://split="


def open_text(
    pattern: str,
    vocab_path: str | None,
    seq_length: int,
    *,
    train: bool = False,
    pack: bool = False,
) -> Source:
    """Opens text as sequences of `seq_length` tokens.

    Args:
        pattern: Text files, or `sample://split=train`, valid or test: the text that is part of
            the package, with its own vocabulary.
        vocab_path: File of `word count` lines, or a tokenizer.json; None uses the bytes of the
            files as tokens.
        seq_length: Tokens in a sequence.
        train: If true, each epoch starts at another offset. If false, each token occurs once, in
            order; the last sequence is padded, and its `token_mask` is False there.
        pack: If true, each line is a document by itself, and a sequence has several documents
            that do not see each other. If false, the lines form one stream, which is cut.

    Raises:
        DataError: If the text does not exist, or contains words that are not in the vocabulary.

    >>> open_text('sample://split=valid', None, 32).info.n_classes
    67
    """
    if pattern.startswith(SAMPLE):
        if vocab_path is not None:
            raise DataError(
                f"{pattern} has its own vocabulary, but vocab_path is {vocab_path!r}. Name text "
                "files for training, validation and evaluation, or do not set vocab_path."
            )
        return _open_sample(pattern, seq_length, train=train, pack=pack)
    if not pack:
        return data.tokens(pattern, vocab_path, seq_length, random_skip=train)
    return data.open_parts(pattern, lambda part: data.documents(part, vocab_path).pack(seq_length))


def _open_sample(pattern: str, seq_length: int, *, train: bool, pack: bool) -> Source:
    split = pattern.removeprefix(SAMPLE)
    if split not in sample_text.SPLITS:
        raise DataError(f"{pattern!r}: no such split; choose from {list(sample_text.SPLITS)}.")
    words = data.Vocabulary(sample_text.vocabulary(), "the sample's vocabulary")
    if pack:
        lines = [{"text": line} for line in sample_text.text(split).splitlines()]
        return data.documents(lines, words).pack(seq_length)
    stream = words.encode(sample_text.text(split).encode(), pattern)
    return Source(
        data.TokenReader(
            stream,
            seq_length,
            pattern,
            random_skip=train,
            n_classes=len(words),
            facts={
                "start_id": words.start_id,
                "end_id": words.end_id,
                "n_tokens": len(stream),
                "vocabulary": words,
            },
        )
    )


def tokens_of(info: Info) -> tuple[int, int]:
    """Returns the size of the vocabulary and the token that starts a text.

    Raises:
        DataError: If the data is not a stream of tokens.
    """
    if info.n_classes is None or "tokens" not in info.shapes:
        raise DataError(
            f"{info.name} is not a stream of tokens: its fields are {dict(info.shapes)}. Use text "
            "files as the pattern, and --module_config.vocab_path if tokens are words."
        )
    start_id = info.facts.get("start_id")
    # Bytes have no start token; the byte 0 does not occur in text.
    return info.n_classes, 0 if start_id is None else start_id


def text_fns(
    info: Info, length: int, inputs: Callable[[jax.Array], Any] | None = None
) -> TextFns | None:
    """Returns how a model on this data reads and writes text; None if the data has no vocabulary.

    As in training, a sequence begins with the start token.

    Args:
        info: The facts of the data.
        length: The most tokens that the model sees at once.
        inputs: As for `TextFns`, if the inputs of the model are not the tokens themselves.
    """
    vocabulary, start_id = info.facts.get("vocabulary"), tokens_of(info)[1]
    if vocabulary is None:
        return None
    return TextFns(
        encode=lambda prompt: [start_id, *vocabulary.encode_prompt(prompt).tolist()],
        decode=lambda tokens: vocabulary.decode(tokens[1:]),
        length=length,
        # In a long text the window of the model has lost its first token.
        inputs=inputs or (lambda tokens: tokens.at[:, 0].set(start_id)),
    )


def check_settings(
    config: Any, prefix: str, *, counts: tuple[str, ...], rates: tuple[str, ...]
) -> None:
    """Rejects counts below 1 and rates outside [0, 1).

    Raises:
        UsageError: It names the flag, with `prefix` before the name of the setting.
    """
    ranges = {**dict.fromkeys(counts, "1 or more"), **dict.fromkeys(rates, "in [0, 1)")}
    for name, allowed in ranges.items():
        value = config[name]
        if not (value >= 1 if name in counts else 0 <= value < 1):
            raise UsageError(f"--module_config.{prefix}{name} must be {allowed}, got {value!r}.")


def check_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    """Rejects a setting that is not one of the choices.

    Raises:
        UsageError: It names the flag.
    """
    if value not in choices:
        allowed = " or ".join(map(repr, choices))
        raise UsageError(f"--module_config.{name} must be {allowed}, got {value!r}.")


def check_rate(opt_config: Any) -> None:
    """Rejects a learning rate for the optimizer "auto".

    Raises:
        UsageError: It names the flag.
    """
    if opt_config.optimizer == "auto" and opt_config.learning_rate is not None:
        raise UsageError(
            "--module_config.opt_config.learning_rate: auto sets its own rates. Choose another "
            "optimizer, such as --module_config.opt_config.optimizer=adam."
        )


Loss = Callable[..., tuple[Mean, dict[str, Mean]]]


def training_loss(*, label_smoothing: float, z_loss: float) -> Loss:
    """Returns the loss: the mean that is minimized, and the plain one as metrics to report.

    Args:
        label_smoothing: As for `tekoa.cross_entropy`.
        z_loss: As for `tekoa.cross_entropy`.
    """
    if not (label_smoothing or z_loss):
        return token_loss
    return functools.partial(changed_loss, label_smoothing=label_smoothing, z_loss=z_loss)


def token_loss(logits_BxLxV: jax.Array, batch: Mapping[str, Any]) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean loss of the tokens in nats, also as the metric `cost`."""
    cost = _mean_over_tokens(cross_entropy(logits_BxLxV, batch["tokens"]), batch)
    return cost, {"cost": cost}


def token_losses(logits_BxLxV: jax.Array, batch: Mapping[str, Any]) -> Mean:
    """Returns the mean loss of the tokens in nats."""
    return token_loss(logits_BxLxV, batch)[0]


def changed_loss(
    logits_BxLxV: jax.Array, batch: Mapping[str, Any], *, label_smoothing: float, z_loss: float
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean loss with smoothing and penalty, and the plain one as metrics."""
    cost = token_losses(logits_BxLxV, batch)
    losses = cross_entropy(
        logits_BxLxV, batch["tokens"], label_smoothing=label_smoothing, z_loss=z_loss
    )
    return _mean_over_tokens(losses, batch), {"loss": cost, "cost": cost}


def check_loss_settings(config: Any) -> None:
    """Rejects settings of `training_loss` that are out of range.

    Raises:
        UsageError: It names the flag.
    """
    check_settings(config, "", counts=(), rates=("label_smoothing",))
    if not config.z_loss >= 0:
        raise UsageError(f"--module_config.z_loss must be 0 or more, got {config.z_loss!r}.")


def reciprocal_ranks(logits_BxLxV: jax.Array, batch: Mapping[str, Any]) -> Mean:
    """Returns the mean of 1 / rank of the true tokens.

    Tokens that are as likely as the true one are ranked before it.
    """
    true = jnp.take_along_axis(logits_BxLxV, batch["tokens"][..., None], axis=-1)
    ranks = jnp.sum(logits_BxLxV >= true, axis=-1)
    return _mean_over_tokens(1 / ranks.astype(jnp.float32), batch)


def _mean_over_tokens(values_BxL: jax.Array, batch: Mapping[str, Any]) -> Mean:
    mask_BxL = jnp.broadcast_to(batch.get("token_mask", True), values_BxL.shape)
    return Mean(jnp.sum(values_BxL, where=mask_BxL), jnp.sum(mask_BxL, dtype=jnp.float32))


def of_one_row(metrics: Mapping[str, Callable[..., Mean]]) -> dict[str, Callable[..., Mean]]:
    """Makes metrics reject batches of several rows.

    For models with a carry: only a single row continues where the previous batch ended.
    """

    def checked(metric: Callable[..., Mean], logits: jax.Array, batch: Mapping[str, Any]) -> Mean:
        if logits.shape[0] != 1:
            raise DataError(
                "This model is evaluated on the text as a single row, in order, but the batch has "
                f"{logits.shape[0]} rows: use --eval_batch_size=1 and --valid_batch_size=1."
            )
        return metric(logits, batch)

    return {name: functools.partial(checked, metric) for name, metric in metrics.items()}


def with_perplexity(metrics: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity, exp(cost); Inf if that exceeds the range of a float.

    >>> with_perplexity({'cost': 0.0})
    {'cost': 0.0, 'perplexity': 1.0}
    """
    try:
        perplexity = math.exp(metrics["cost"])
    except OverflowError:
        perplexity = math.inf
    return {**metrics, "perplexity": perplexity}
