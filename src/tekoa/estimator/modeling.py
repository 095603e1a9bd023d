"""Small parts of models under the names that JEstimator's model files import."""

import contextvars
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike

_passed_down: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "passed_down", default=None
)


def sparse_xe_with_logits(
    labels: ArrayLike,
    logits: ArrayLike,
    mask: ArrayLike | None = None,
    normalized: bool = False,
    reduce_all: bool = True,
) -> jax.Array:
    """Gives the cross entropy of whole-number labels.

    Args:
        labels: Labels of any shape.
        logits: Their shape and one more axis.
        mask: Where it is false, a label does not count.
        normalized: Whether the logits are logarithms of probabilities already.
        reduce_all: If true, the sum over all labels, else one number for each.

    >>> print(sparse_xe_with_logits(jnp.array([0, 1]), jnp.zeros((2, 4))))
    2.7725887
    """
    logs = jnp.asarray(logits) if normalized else jax.nn.log_softmax(logits)
    found = -jnp.take_along_axis(logs, jnp.asarray(labels)[..., None], axis=-1)[..., 0]
    if mask is not None:
        found = jnp.where(mask, found, jnp.zeros((), found.dtype))
    return jnp.sum(found) if reduce_all else found


def normalize_loss_by_size(loss: ArrayLike, size: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Divides a sum and its count by the root of the count; their ratio stays.

    >>> [float(x) for x in normalize_loss_by_size(8.0, 4.0)]
    [4.0, 2.0]
    """
    loss = jnp.asarray(loss)
    size = jnp.asarray(size, loss.dtype)
    return loss * jax.lax.rsqrt(size), jnp.sqrt(size)


def unstack(x: jax.Array, axis: int) -> list[jax.Array]:
    """Gives the slices along an axis.

    >>> [part.shape for part in unstack(jnp.zeros((2, 3)), -1)]
    [(2,), (2,), (2,)]
    """
    return list(jnp.moveaxis(x, axis, 0))


def truncated_normal_initializer(stddev: ArrayLike) -> Callable[..., jax.Array]:
    """Makes an initializer: normal numbers within two deviations, times `stddev`."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * stddev

    return init


def global_kwargs(*inherits: str, pass_down: bool = False) -> Callable[..., Any]:
    """Lets keyword arguments reach functions that are called further down.

    Args:
        *inherits: Arguments that the function takes from above where it is not given them.
        pass_down: If true, arguments that the function does not have go to those it calls.

    >>> @global_kwargs('training')
    ... def inner(x, training=False):
    ...     return x, training
    >>> @global_kwargs(pass_down=True)
    ... def outer(x):
    ...     return inner(x)
    >>> outer(1, training=True)
    (1, True)
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function).parameters
        unknown = [name for name in inherits if name not in own]
        if unknown or any(p.kind is p.VAR_KEYWORD for p in own.values()):
            raise TypeError(
                f"{function.__name__} must have the arguments {list(inherits)} by name, and no "
                f"**kwargs; it has {list(own)}."
            )

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            above = _passed_down.get() or {}
            taken = {name: above[name] for name in inherits if name in above}
            taken.update({name: value for name, value in kwargs.items() if name in own})
            rest = {name: value for name, value in kwargs.items() if name not in own}
            if rest and not pass_down:
                raise TypeError(f"{function.__name__} has no argument {next(iter(rest))!r}.")
            token = _passed_down.set({**above, **rest})
            try:
                return function(*args, **taken)
            finally:
                _passed_down.reset(token)

        return wrapped

    return wrap


class Dropout(nn.Module):
    """Dropout that is on where `enable_dropout` is passed down to it.

    It draws from the stream "dropout", which `value_and_grad_apply_fn` fills. Inside
    `nn.scan` that stream must be named: `split_rngs={"params": False, "dropout": True}`.
    """

    rate: float

    @global_kwargs("enable_dropout")
    def __call__(self, inputs: ArrayLike, enable_dropout: bool = False) -> jax.Array:
        """Sets a part of the inputs to zero and makes up for it in the others."""
        x = jnp.asarray(inputs)
        if not enable_dropout or self.rate == 0:
            return x
        if self.rate == 1:
            return jnp.zeros_like(x)
        is_kept = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, x.shape)
        return jnp.where(is_kept, x / (1 - self.rate), jnp.zeros_like(x))
