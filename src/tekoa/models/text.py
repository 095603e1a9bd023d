"""What the language models share: opening text, and the scores of predicted tokens."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tekoa.core.metrics import Mean
from tekoa.data import DataError, Info, Source
from tekoa.data import language as streams
from tekoa.data.reader import describe
from tekoa.data.vocabulary import Vocabulary
from tekoa.estimator.config import UsageError
from tekoa.models import sample_text

SAMPLE = "sample://split="


def open_text(
    pattern: str, vocab_path: str | None, seq_length: int, *, train: bool = False
) -> Source:
    """Opens text as a stream of tokens in pieces of `seq_length`.

    Args:
        pattern: Text files, or `sample://split=train`, valid or test: the text that comes with
            the package and has its own vocabulary.
        vocab_path: File of `word count` lines; None takes the bytes of the files as tokens.
        seq_length: Tokens in a piece.
        train: If true, each epoch is cut at other places; else each token is given once, in
            order, the last piece filled up and its `token_mask` False there.

    Raises:
        DataError: If there is no such text, or it has words that the vocabulary has not.

    >>> open_text('sample://split=valid', None, 32).info.n_classes
    67
    """
    if pattern.startswith(SAMPLE):
        if vocab_path is not None:
            raise DataError(
                f"{pattern} has its own vocabulary, not {vocab_path!r}. Name text files for "
                "training, validation and evaluation, or leave vocab_path out."
            )
        return _sample(pattern, seq_length, train=train)
    return streams.tokens(pattern, vocab_path, seq_length, random_skip=train)


def _sample(pattern: str, seq_length: int, *, train: bool) -> Source:
    split = pattern.removeprefix(SAMPLE)
    if split not in sample_text.SPLITS:
        raise DataError(f"{pattern!r} has no such split; there are {list(sample_text.SPLITS)}.")
    words = Vocabulary(sample_text.vocabulary(), "the sample's vocabulary")
    stream = words.encode(sample_text.text(split).encode(), pattern)
    reader = streams.TokenReader(stream, seq_length, pattern, random_skip=train)
    facts = {"start_id": words.start_id, "end_id": words.end_id, "n_tokens": len(stream)}
    reader.info = describe(pattern, reader.first(), n_classes=len(words), facts=facts)
    return Source(reader)


def tokens_of(info: Info) -> tuple[int, int]:
    """Gives the size of the vocabulary and the token that starts a text.

    Raises:
        DataError: If the data is no stream of tokens.
    """
    if info.n_classes is None or "tokens" not in info.shapes:
        raise DataError(
            f"{info.name} is no stream of tokens: its fields are {dict(info.shapes)}. Give text "
            "files as the pattern, and --module_config.vocab_path where tokens are words."
        )
    start_id = info.facts.get("start_id")
    # Bytes have no mark of their own; text does not have the byte 0.
    return info.n_classes, 0 if start_id is None else start_id


def check_settings(
    config: Any, prefix: str, *, counts: tuple[str, ...], rates: tuple[str, ...]
) -> None:
    """Refuses counts below 1 and rates outside [0, 1).

    Raises:
        UsageError: It names the flag, with `prefix` before the setting's name.
    """
    wanted = {**dict.fromkeys(counts, "1 or more"), **dict.fromkeys(rates, "in [0, 1)")}
    for name, words in wanted.items():
        value = config[name]
        if not (value >= 1 if name in counts else 0 <= value < 1):
            raise UsageError(f"--module_config.{prefix}{name} must be {words}, got {value!r}.")


def check_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    """Refuses a setting that is none of the choices.

    Raises:
        UsageError: It names the flag.
    """
    if value not in choices:
        wanted = " or ".join(map(repr, choices))
        raise UsageError(f"--module_config.{name} must be {wanted}, got {value!r}.")


def token_losses(logits_BxLxV: jax.Array, batch: Mapping[str, Any]) -> Mean:
    """Gives the sum of the tokens' losses in nats, and their number."""
    logits = logits_BxLxV.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    return _over_tokens(losses, batch)


def reciprocal_ranks(logits_BxLxV: jax.Array, batch: Mapping[str, Any]) -> Mean:
    """Gives the sum of 1 / rank of the true tokens, and their number.

    Tokens that are as likely as the true one stand before it.
    """
    true = jnp.take_along_axis(logits_BxLxV, batch["tokens"][..., None], axis=-1)
    ranks = jnp.sum(logits_BxLxV >= true, axis=-1)
    return _over_tokens(1 / ranks.astype(jnp.float32), batch)


def _over_tokens(values_BxL: jax.Array, batch: Mapping[str, Any]) -> Mean:
    mask = batch.get("token_mask")
    if mask is None:
        return Mean(jnp.sum(values_BxL), jnp.float32(values_BxL.size))
    return Mean(jnp.sum(jnp.where(mask, values_BxL, 0.0)), jnp.sum(jnp.asarray(mask, jnp.float32)))


def of_one_row(metrics: Mapping[str, Callable[..., Mean]]) -> dict[str, Callable[..., Mean]]:
    """Makes metrics refuse batches of several rows.

    For models with a carry: only a single row goes on where the batch before ended.
    """

    def checked(metric: Callable[..., Mean], logits: jax.Array, batch: Mapping[str, Any]) -> Mean:
        if logits.shape[0] != 1:
            raise DataError(
                "This model is evaluated on a text as one row, in order, but was given "
                f"{logits.shape[0]} rows: use --eval_batch_size=1 and --valid_batch_size=1."
            )
        return metric(logits, batch)

    return {name: functools.partial(checked, metric) for name, metric in metrics.items()}


def with_perplexity(metrics: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity, e to the cost; infinite where that is beyond a float.

    >>> with_perplexity({'cost': 0.0})
    {'cost': 0.0, 'perplexity': 1.0}
    """
    try:
        perplexity = math.exp(metrics["cost"])
    except OverflowError:
        perplexity = math.inf
    return {**metrics, "perplexity": perplexity}
