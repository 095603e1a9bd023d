"""Building blocks under the names that model files for JEstimator import."""

import contextlib
import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning
from jax.typing import ArrayLike

# The types that model files import from FlaxFormer, for annotations.
Array = jax.Array
DType = Any
Initializer = Callable[..., Any]
PRNGKey = Any
Shape = tuple[int, ...]

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
    """Computes the cross entropy of integer labels.

    Args:
        labels: Labels of any shape.
        logits: Logits, with one more axis than the labels.
        mask: Labels where it is false are ignored.
        normalized: Whether the logits are log probabilities already.
        reduce_all: If true, returns the sum over all labels, else one number per label.

    >>> print(sparse_xe_with_logits(jnp.array([0, 1]), jnp.zeros((2, 4))))
    2.7725887
    """
    logs = jnp.asarray(logits) if normalized else jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(logs, jnp.asarray(labels)[..., None], axis=-1)[..., 0]
    if mask is not None:
        losses = jnp.where(mask, losses, jnp.zeros((), losses.dtype))
    return jnp.sum(losses) if reduce_all else losses


def normalize_loss_by_size(loss: ArrayLike, size: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Divides a sum and its count by the square root of the count, which keeps their ratio.

    >>> [float(x) for x in normalize_loss_by_size(8.0, 4.0)]
    [4.0, 2.0]
    """
    loss = jnp.asarray(loss)
    size = jnp.asarray(size, loss.dtype)
    return loss * jax.lax.rsqrt(size), jnp.sqrt(size)


def unstack(x: jax.Array, axis: int) -> list[jax.Array]:
    """Returns the slices along an axis.

    >>> [x.shape for x in unstack(jnp.zeros((2, 3)), -1)]
    [(2,), (2,), (2,)]
    """
    return list(jnp.unstack(x, axis=axis))


def truncated_normal_initializer(stddev: ArrayLike) -> Callable[..., jax.Array]:
    """Creates an initializer: normal numbers truncated at two deviations, times `stddev`."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * stddev

    return init


def global_kwargs(*inherits: str, pass_down: bool = False) -> Callable[..., Any]:
    """Lets a function receive keyword arguments from functions higher in the call stack.

    Args:
        *inherits: Arguments that the function inherits if its caller does not pass them.
        pass_down: If true, keyword arguments that the function does not have are passed down
            to the functions it calls.

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
                f"{function.__name__} must have the parameters {list(inherits)}, and no **kwargs; "
                f"it has {list(own)}."
            )

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            inherited = _passed_down.get() or {}
            arguments = {name: inherited[name] for name in inherits if name in inherited}
            arguments.update({name: value for name, value in kwargs.items() if name in own})
            rest = {name: value for name, value in kwargs.items() if name not in own}
            if rest and not pass_down:
                raise TypeError(f"{function.__name__} has no argument {next(iter(rest))!r}.")
            token = _passed_down.set({**inherited, **rest})
            try:
                return function(*args, **arguments)
            finally:
                _passed_down.reset(token)

        return wrapped

    return wrap


class Dropout(nn.Module):
    """Dropout that is active if `enable_dropout` is passed down to it.

    It draws from the stream "dropout", which `value_and_grad_apply_fn` provides, also inside
    an `nn.scan` whose `split_rngs` does not name it.
    """

    rate: float

    @global_kwargs("enable_dropout")
    def __call__(self, inputs: ArrayLike, enable_dropout: bool = False) -> jax.Array:
        """Sets a random part of the inputs to zero and scales up the rest."""
        x = jnp.asarray(inputs)
        if not enable_dropout or self.rate == 0:
            return x
        if self.rate == 1:
            return jnp.zeros_like(x)
        mask = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, x.shape)
        return jnp.where(mask, x / (1 - self.rate), jnp.zeros_like(x))


@contextlib.contextmanager
def dropout_in_scans() -> Iterator[None]:
    """Lets every `nn.scan` in the block pass on the stream "dropout", with a key per iteration.

    JEstimator's dropout needs no stream, so its models do not name one in `split_rngs`.
    """
    scan = nn.scan

    @functools.wraps(scan)
    def scan_with_dropout(*args: Any, **options: Any) -> Any:
        streams = dict(options.get("split_rngs", {}))
        if all(isinstance(name, str) for name in streams):
            options["split_rngs"] = {"dropout": True, **streams}
        return scan(*args, **options)

    nn.scan = scan_with_dropout
    try:
        yield
    finally:
        nn.scan = scan


class DenseGeneral(nn.Module):
    """A dense layer over any axes, with logical axis names, as in FlaxFormer.

    Attributes:
        features: Size of each output axis.
        use_bias: Whether to add a bias.
        axis: The input axes to contract.
        dtype: The dtype of the computation.
        kernel_init: Creates the kernel.
        bias_init: Creates the bias.
        precision: As in `jax.lax.dot_general`.
        kernel_axis_names: Logical names of the input and output axes.
        reshape_kernel: Whether the kernel is stored as a matrix.
    """

    features: int | Sequence[int]
    use_bias: bool
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = nn.initializers.zeros
    precision: Any = None
    kernel_axis_names: Sequence[str] | None = None
    reshape_kernel: bool = True

    @nn.compact
    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Returns the other axes of the input, followed by the features."""
        x = jnp.asarray(inputs, self.dtype)
        axes = tuple(i % x.ndim for i in _as_tuple(self.axis))
        features = _as_tuple(self.features)
        in_shape = tuple(x.shape[i] for i in axes)
        names = self.kernel_axis_names
        names = ("unmodeled",) * (len(axes) + len(features)) if names is None else tuple(names)
        if len(names) != len(in_shape + features):
            raise ValueError(
                f"kernel_axis_names must name the {len(in_shape + features)} axes of a kernel of "
                f"shape {in_shape + features}, got {names}."
            )
        out_names = names[len(axes) :]
        shape = in_shape + features
        if self.reshape_kernel:
            shape = (math.prod(in_shape), math.prod(features))
            out_names = (" * ".join(out_names),)
            names = (" * ".join(names[: len(axes)]), *out_names)
        kernel = partitioning.param_with_axes(
            "kernel", self.kernel_init, shape, jnp.float32, axes=names
        )
        kernel = jnp.asarray(kernel, self.dtype).reshape(in_shape + features)
        contract = (axes, tuple(range(len(axes))))
        out = jax.lax.dot_general(x, kernel, (contract, ((), ())), precision=self.precision)
        if not self.use_bias:
            return out
        bias = partitioning.param_with_axes(
            "bias", self.bias_init, (math.prod(features),), jnp.float32, axes=out_names[-1:]
        )
        return out + jnp.asarray(bias, self.dtype).reshape(features)


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
