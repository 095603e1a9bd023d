"""Parts of Tekoa as plain code, which ejected files copy: they import nothing of Tekoa.

Each is tested to have the bits of the part that it stands for, without the options and checks that
a single run does not use.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

Mean = collections.namedtuple("Mean", "total count")
DataError = UsageError = ValueError


class Config(dict):
    """Settings, as attributes or items."""

    __getattr__ = dict.__getitem__


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
    """Returns an array as it is, on one device."""
    return x


def are_finite(tree: Any) -> jax.Array:
    """Whether arrays have no NaN or Inf; matrix products are the fastest way on CPU."""
    leaves = jax.tree.leaves(tree)
    rows = [x @ jnp.full(x.shape[-1], 0.5 / x.shape[-1]) if x.ndim > 1 else x for x in leaves]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(row)) for row in rows]))


def amos(
    learning_rate: Callable[[jax.Array], jax.Array], beta: float, scales: Any, by_slabs: bool
) -> optax.GradientTransformation:
    """Creates the optimizer Amos (arXiv 2210.11693); `scales` has scales and slot shapes."""

    def init(params: Any) -> Any:
        slots = [jnp.zeros(shape) for _, shape in scales.values()]
        return jnp.zeros((), jnp.int32), slots, slots

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count, vs, bs = state
        count = count + 1
        xi = jnp.float32(learning_rate(count))
        unbias = -jnp.expm1(count.astype(jnp.float32) * jnp.log(jnp.float32(beta)))

        def update_one(scale: Any, p: Any, g: Any, v: Any, b: Any) -> Any:
            eta, g2 = scale[0], mean_of_squares(g, v.shape, by_slabs)
            v = beta * v + (1 - beta) * g2
            floored, shrink = jnp.maximum(v, 2**-125), 1 + 0.25 * jnp.sqrt(xi) * b
            gamma = xi**2 * unbias * g2 / floored * jax.lax.rsqrt(shrink)
            one_by_D = 1 + 0.25 * jnp.sqrt(xi * eta) * b
            decay, rate = 0.5 * gamma, xi * eta * jnp.sqrt(unbias) * jax.lax.rsqrt(floored)
            if v.shape == p.shape:
                delta = -(decay * p + rate * g) / one_by_D
                first = p + delta
            else:
                decay, rate = decay / one_by_D, rate / one_by_D
                delta, first = -decay * p - rate * g, decay + rate
            b = b + (1 + b) * (xi**2 * unbias * g2) / (floored * jnp.sqrt(shrink))
            return delta, v, jnp.where(jnp.isnan(first), jnp.nan, b)  # Fixes the order.

        leaves = [jax.tree.leaves(tree) for tree in (params, updates, vs, bs)]
        deltas, vs, bs = zip(*map(update_one, scales.values(), *leaves))
        deltas = jax.tree.unflatten(jax.tree.structure(params), deltas)
        return deltas, (count, list(vs), list(bs))

    return optax.GradientTransformation(init, update)


def mean_of_squares(x: jax.Array, shape: tuple[int, ...], by_slabs: bool) -> jax.Array:
    """Averages squares over the axes that the slot lacks or has at size 1."""
    aligned = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, aligned)) if m < n)
    squares = jnp.square(x)
    if by_slabs and axes == (0,) and x.ndim > 1 and len(x) % 8 == 0 and x.size >= 2**16:
        # Adding eight slabs first is faster on CPU, and rounds differently.
        sums = [*squares.reshape(8, len(x) // 8, -1)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
        weights = jnp.full(len(x) // 8, 1 / len(x), x.dtype)
        return jnp.matmul(weights, sums[0], precision="highest").reshape(shape)
    means = jnp.mean(squares, axis=axes, keepdims=True) if axes else squares
    return means.reshape(shape)


def step_size(peak: float, n_warmup: int, n_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the relative size of step n: it rises, then decreases to 0."""

    def size(n: Any) -> Any:
        rise = jnp.minimum(1.0, (n + 1) / max(n_warmup, 1))
        progress = jnp.clip((n + 1 - n_warmup) / (n_steps + 1 - n_warmup), 0.0, 1.0)
        return peak * rise * (1 - progress)

    return size


def anytime_step_size(c: float, n_warmup: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the relative size of step n: it rises, then decreases with its square root."""

    def size(n: Any) -> Any:
        done = jnp.asarray(n + 1, jnp.float32)
        rise = jnp.minimum(1.0, done / n_warmup)
        return 0.5 * c * rise / jnp.sqrt(2 * jnp.maximum(done, n_warmup))

    return size


def sphere(
    size_of: Callable[[jax.Array], jax.Array], roles: Any, b1: float, b2: float, min_rms: float
) -> optax.GradientTransformation:
    """Creates the optimizer: steps relative to the scales, on which hidden kernels stay."""

    def rms(x: Any) -> Any:
        return jnp.sqrt(jnp.mean(jnp.square(x), keepdims=True))

    def init(params: Any) -> Any:
        zeros = [jnp.zeros_like(p) for p in jax.tree.leaves(params)]
        return jnp.zeros((), jnp.int32), zeros, zeros

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        n, mus, nus = state
        # The first step rescales the kernels: the moments start again after it.
        mus, nus = jax.tree.map(lambda x: jnp.where(n == 1, 0, x), (mus, nus))
        count = jnp.maximum(n, 1)
        unbias_mu, unbias_nu = 1 - jnp.float32(b1) ** (count + 1), 1 - jnp.float32(b2) ** count

        def update_one(role: Any, p: Any, g: Any, mu: Any, nu: Any) -> Any:
            scale, size, direction, radius = role
            mu = b1 * mu + (1 - b1) * g
            nu = b2 * nu + (1 - b2) * jnp.square(g)
            mean = (b1 * mu + (1 - b1) * g) / unbias_mu
            u = mean * jax.lax.rsqrt(jnp.maximum(nu / unbias_nu, 2**-125))
            if direction == "divided":
                size = size / jnp.maximum(rms(u), min_rms)
            elif direction is not None:
                u = orthogonalised(u, *direction)
            delta = -size_of(n) * (u * size)
            if radius is not None:
                length = rms(p + delta)
                factor = jnp.where(length > 0, scale / jnp.where(length > 0, length, 1), 1)
                if radius == "at first":
                    factor = jnp.where(n == 0, jnp.minimum(factor, 1), 1)
                delta = (p + delta) * factor - p
            return delta, mu, nu

        leaves = [jax.tree.leaves(tree) for tree in (params, updates, mus, nus)]
        deltas, mus, nus = zip(*map(update_one, roles.values(), *leaves))
        deltas = jax.tree.unflatten(jax.tree.structure(params), deltas)
        return deltas, (n + 1, list(mus), list(nus))

    return optax.GradientTransformation(init, update)


def orthogonalised(u: jax.Array, order: Any, shape: Any) -> jax.Array:
    """Makes the singular values of blocks of a kernel about equal, as Muon does."""
    product = functools.partial(jnp.matmul, precision="highest")

    def trace(x: Any) -> Any:
        return jnp.trace(x, axis1=-2, axis2=-1)[..., None, None]

    def inverse_root(x: Any) -> Any:
        return jnp.where(x > 0, jax.lax.rsqrt(x), 0)

    n_blocks, size, length = shape
    moved = jnp.transpose(u, order)
    rows = moved.reshape(-1, length)
    side, eye = len(rows), jnp.eye(size)
    blocks = jnp.pad(rows, [(0, n_blocks * size - side), (0, 0)]).reshape(shape)
    gram = product(blocks, jnp.swapaxes(blocks, -1, -2))
    scale = inverse_root(trace(gram))  # No singular value is above 1 then.
    gram, total = gram * jnp.square(scale), eye * scale
    for _ in range(3):
        factor = 3.4445 * eye + -4.7750 * gram + 2.0315 * product(gram, gram)
        gram, total = product(factor, product(gram, factor)), product(factor, total)
    square = jnp.sum(trace(gram), axis=-3, keepdims=True) / (side * length)
    result = product(total * inverse_root(square), blocks).reshape(-1, length)
    back = [order.index(axis) for axis in range(u.ndim)]
    return jnp.transpose(result[:side].reshape(moved.shape), back)


class TrainState(struct.PyTreeNode):
    """Parameters, optimizer, other variables and key, passed from step to step."""

    step: jax.Array
    params: Any
    opt_state: Any
    _vars: Any
    _state_rng: jax.Array
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    metrics_mod: nn.Module = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls, metrics_mod: Any, tx: Any, model: Any, rng: Any, *inputs: Any, **options: Any
    ) -> "TrainState":
        """Creates the state before the first step."""
        options.pop("save_mutable", None)
        init_rng, rng = jax.random.split(rng)
        streams = enumerate(("params", "dropout"))
        keys = {name: jax.random.fold_in(init_rng, i) for i, name in streams}
        variables = jax.jit(lambda keys: nn.meta.unbox(model.init(keys, *inputs, **options)))(keys)
        params = variables.pop("params")
        step = jnp.zeros((), jnp.int32)
        return cls(step, params, tx.init(params), variables, rng, model.apply, tx, metrics_mod)

    def step_rng(self) -> jax.Array:
        """Returns the key of this step."""
        return jax.random.fold_in(jax.random.fold_in(self._state_rng, self.step), 0)

    def value_and_grad_apply_fn(self, has_aux: bool = False) -> Callable[..., Any]:
        """Returns a function that computes the loss, what comes with it, and gradients."""

        def loss_of(params: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = {"rngs": {"dropout": self.step_rng()}, **kwargs}
            variables = {**self._vars, "params": params}
            outputs, changed = self.apply_fn(variables, *args, **kwargs, mutable=[*self._vars])
            loss, *aux = outputs if has_aux else (outputs,)
            aux = [*aux, changed] if self._vars else aux
            return loss, aux[0] if len(aux) == 1 else tuple(aux)

        def value_and_grad(*args: Any, **kwargs: Any) -> Any:
            (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(*args, **kwargs)
            return (loss, aux) if has_aux or self._vars else loss, grads

        return value_and_grad

    def apply_gradients(self, *, grads: Any, **changes: Any) -> "TrainState":
        """Returns the state after an update."""
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **changes)


class MeanMetrics(nn.Module):
    """Totals and counts of metrics, in the collection "metrics"."""

    names: tuple[str, ...] = ()

    @classmethod
    def create(cls, *names: str) -> "MeanMetrics":
        """Creates the metrics with these names."""
        return cls(names)

    def setup(self):
        """Creates the variables."""
        parts = [f"{name}_{part}" for name in self.names for part in ("total", "count")]
        self.sums = {part: self.variable("metrics", part, jnp.zeros, ()) for part in parts}

    def __call__(self) -> dict[str, jax.Array]:
        """Returns the means."""
        total, count = (
            {name: self.sums[f"{name}_{part}"].value for name in self.names}
            for part in ("total", "count")
        )
        return {name: total[name] / jnp.where(count[name] == 0, 1.0, count[name]) for name in total}

    def update(self, name: str, total: Any, count: Any = 1.0) -> None:
        """Adds a total and a count."""
        for part, value in (("total", total), ("count", count)):
            self.sums[f"{name}_{part}"].value += jnp.asarray(value, jnp.float32)
