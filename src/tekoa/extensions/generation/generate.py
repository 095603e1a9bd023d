"""`generate`: tokens that continue a prompt, drawn from any model that returns logits."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core.trees import PyTree


def generate(
    apply: Callable[[PyTree, jax.Array], jax.Array],
    params: PyTree,
    prompt: Any,
    rng: jax.Array | None = None,
    *,
    n_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    length: int | None = None,
) -> jax.Array:
    """Returns tokens that continue a prompt; a pure function, to be jitted with its options.

    Each token costs one call of the model on all tokens so far: there is no cache of keys and
    values, so that any causal model will do.

    Args:
        apply: `apply(params, tokens)` returns logits (rows, length, vocabulary). Those of position
            i are of the token after it; later tokens must not change them.
        params: Passed to `apply`.
        prompt: Tokens, at least one: an array (length,) or (rows, length).
        rng: The key from which tokens are drawn; not used if the temperature is 0.
        n_tokens: How many tokens to return.
        temperature: Divides the logits. 0 always chooses the likeliest token.
        top_p: Only the likeliest tokens whose probabilities add up to this are drawn: nucleus
            sampling. 1 allows all.
        length: The most tokens that the model sees at once; of more, the last ones. None for no
            limit.

    Returns:
        The new tokens, (n_tokens,) or (rows, n_tokens), int32.

    Raises:
        ValueError: If an argument is out of range, or the logits have another shape.

    >>> def count_up(params, tokens):  # The next number, by far the likeliest.
    ...     return 9.0 * jax.nn.one_hot(tokens + 1, 10)
    >>> generate(count_up, None, [2, 3], n_tokens=4, temperature=0.0)
    Array([4, 5, 6, 7], dtype=int32)
    """
    check_options(n_tokens=n_tokens, temperature=temperature, top_p=top_p, length=length)
    if rng is None and temperature > 0:
        raise ValueError("Drawing tokens needs a key: pass rng=, or temperature=0.")
    prompt = jnp.asarray(prompt, jnp.int32)
    if prompt.ndim not in (1, 2) or not prompt.size:
        raise ValueError(
            f"A prompt has the shape (length,) or (rows, length), with at least one token; got "
            f"{prompt.shape}."
        )
    rows = prompt if prompt.ndim == 2 else prompt[None]
    # The last token that is drawn is never seen.
    size = min(rows.shape[1] + n_tokens - 1, length or math.inf)
    window, n_seen = rows[:, -size:], min(rows.shape[1], size)
    window = jnp.pad(window, ((0, 0), (0, size - n_seen)))

    def add(state: tuple[jax.Array, jax.Array], key: Any) -> Any:
        window, n_seen = state
        logits = _checked(apply(params, window), window)
        last = jax.lax.dynamic_index_in_dim(logits, n_seen - 1, axis=1, keepdims=False)
        tokens = draw(last, key, temperature=temperature, top_p=top_p)
        # A full window drops its oldest token.
        window = jnp.where(n_seen < size, window, jnp.roll(window, -1, axis=1))
        window = window.at[:, jnp.minimum(n_seen, size - 1)].set(tokens)
        return (window, jnp.minimum(n_seen + 1, size)), tokens

    keys = jnp.zeros(n_tokens) if rng is None else jax.random.split(rng, n_tokens)
    _, tokens = jax.lax.scan(add, (window, jnp.int32(n_seen)), keys)
    return tokens.T if prompt.ndim == 2 else tokens[:, 0]


def draw(logits: jax.Array, rng: jax.Array, *, temperature: float, top_p: float) -> jax.Array:
    """Draws one token per row of logits (rows, vocabulary); arguments as for `generate`."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / temperature
    if top_p == 1:
        return jax.random.categorical(rng, logits).astype(jnp.int32)
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    probabilities = jax.nn.softmax(ranked)
    # The likeliest token is always allowed: nothing is before it.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    rank = jax.random.categorical(rng, jnp.where(before < top_p, ranked, -jnp.inf))
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)


def check_options(*, n_tokens: int, temperature: float, top_p: float, length: int | None) -> None:
    """Raises `ValueError` if an option of `generate` is out of range."""
    if n_tokens < 1:
        raise ValueError(f"n_tokens must be 1 or more, got {n_tokens}.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or more, got {temperature}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}.")
    if length is not None and length < 1:
        raise ValueError(f"length must be 1 or more, or None, got {length}.")


def _checked(logits: Any, tokens: jax.Array) -> jax.Array:
    shape = jnp.shape(logits)
    if len(shape) != 3 or shape[:2] != tokens.shape:
        raise ValueError(
            f"The model must return logits (rows, length, vocabulary) for tokens of shape "
            f"{tokens.shape}, got {shape}."
        )
    return logits
