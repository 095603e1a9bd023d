"""Parts of Tekoa as plain code, which ejected files copy: they import nothing of Tekoa.

Each is tested to have the bits of the part that it stands for, without the options and checks that
a single run does not use.
"""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def sphere(step_size: Callable[[jax.Array], jax.Array], roles: Any) -> optax.GradientTransformation:
    """Creates the optimizer: steps relative to the scales, on which hidden kernels stay."""
    rms = lambda x: jnp.sqrt(jnp.mean(jnp.square(x), keepdims=True))  # noqa: E731

    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), zeros, zeros

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        n, mus, nus = state
        # The first step rescales the kernels: the moments start again after it.
        mus, nus = jax.tree.map(lambda x: jnp.where(n == 1, 0, x), (mus, nus))
        count = jnp.maximum(n, 1)
        unbias_mu, unbias_nu = 1 - jnp.float32(0.9) ** (count + 1), 1 - jnp.float32(0.99) ** count

        def update_one(path: Any, p: Any, g: Any, mu: Any, nu: Any) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            scale, size, direction, radius = next(roles[k] for k in roles if name in k.split())
            mu, nu = 0.9 * mu + 0.1 * g, 0.99 * nu + 0.01 * jnp.square(g)
            mean = (0.9 * mu + 0.1 * g) / unbias_mu
            u = mean * jax.lax.rsqrt(jnp.maximum(nu / unbias_nu, 2**-125))
            if direction == "divided":
                size = size / jnp.maximum(rms(u), 0.2)
            elif direction is not None:
                u = orthogonalised(u, *direction)
            delta = -step_size(n) * (u * size)
            if radius is not None:
                length = rms(p + delta)
                factor = jnp.where(length > 0, scale / jnp.where(length > 0, length, 1), 1)
                if radius == "at first":
                    factor = jnp.where(n == 0, jnp.minimum(factor, 1), 1)
                delta = (p + delta) * factor - p
            return delta, mu, nu

        results = jax.tree_util.tree_map_with_path(update_one, params, updates, mus, nus)
        deltas, mus, nus = jax.tree.transpose(jax.tree.structure(params), None, results)
        return deltas, (n + 1, mus, nus)

    return optax.GradientTransformation(init, update)


def orthogonalised(u: jax.Array, order: Any, shape: Any) -> jax.Array:
    """Makes the singular values of blocks of a kernel about equal, as Muon does."""
    dot = functools.partial(jnp.matmul, precision="highest")
    trace = functools.partial(jnp.trace, axis1=1, axis2=2)
    rows = jnp.transpose(u, order).reshape(-1, shape[2])
    if u.size < math.prod(shape):
        rows = jnp.pad(rows, [(0, shape[0] * shape[1] - len(rows)), (0, 0)])
    blocks = rows.reshape(shape)
    gram, eye = dot(blocks, blocks.mT), jnp.eye(shape[1])
    square = trace(gram)[:, None, None]
    scale = jnp.where(square > 0, jax.lax.rsqrt(square), 0)
    gram, total = gram * jnp.square(scale), eye * scale  # No singular value is above 1 now.
    for _ in range(3):
        factor = 3.4445 * eye - 4.775 * gram + 2.0315 * dot(gram, gram)
        gram, total = dot(factor, dot(gram, factor)), dot(factor, total)
    square = jnp.sum(trace(gram)) / u.size * shape[0] ** 0.5
    result = dot(total * jnp.where(square > 0, jax.lax.rsqrt(square), 0), blocks)
    if u.size < math.prod(shape):
        result = result.reshape(-1, shape[2])[: u.size // shape[2]]
    return jnp.transpose(result.reshape([u.shape[i] for i in order]), np.argsort(order).tolist())


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
