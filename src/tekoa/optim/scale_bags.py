"""Runs one operation on bags: arrays of which only the distribution is known.

Most operations work entry by entry and are simply applied to the samples. The others get
a small rule here that says what happens to the distribution: moving keeps it, summing n
entries adds n independent ones, contracting gives a normal of the right moments.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tekoa.optim import scale_values
from tekoa.optim.scale_values import N_SAMPLES, Bag

BagRule = Callable[[Any, list[Any], np.random.Generator], list[Bag]]

MAX_DRAWS = 32  # Of the entries that a reduction reads; the rest follows from the moments.
# These have no meaning outside their mesh, so they run on bags even where data is there.
MESH_OPS = {
    "axis_index",
    "psum",
    "psum2",
    "psum_invariant",
    "pmax",
    "pmin",
    "ppermute",
    "all_gather",
    "all_to_all",
    "all_gather_invariant",
    "reduce_scatter",
    "pvary",
    "pcast",
    "pbroadcast",
}
_MOVES = MESH_OPS | {
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "squeeze",
    "expand_dims",
    "slice",
    "dynamic_slice",
    "rev",
    "copy",
    "copy_p",
    "gather",
    "sharding_constraint",
    "reduce_precision",
    "split",
    "top_k",
    "approx_top_k",
    "cummax",
    "cummin",
}


def execute(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    """Gives the outputs of an equation of a jaxpr, as bags.

    Args:
        eqn: The equation.
        data: For each input an array or a bag.
        rng: Where new randomness comes from.
    """
    name = eqn.primitive.name
    if name in _RULES:
        return _RULES[name](eqn, data, rng)
    if name in _MOVES and data:
        return [
            _cast(_elsewhere(eqn, data[0], i), var.aval.dtype, rng)
            for i, var in enumerate(eqn.outvars)
        ]
    outs = _entrywise(eqn, data) if data and _looks_entrywise(eqn) else None
    return outs or [scale_values.unit_bag(var.aval.dtype, rng) for var in eqn.outvars]


def _entrywise(eqn: Any, data: list[Any]) -> list[Bag] | None:
    samples = [jnp.asarray(scale_values.as_samples(x)) for x in data]
    try:
        out = eqn.primitive.bind(*samples, **eqn.params)
    except (TypeError, ValueError, IndexError):
        return None  # It keeps the shape but does not work entry by entry, as cholesky.
    outs = out if eqn.primitive.multiple_results else [out]
    # Rows are drawn apart, so a mask may leave one of them with nothing: 0 / 0.
    return [Bag(np.where(np.isnan(x), 0, x).astype(x.dtype)) for x in map(np.asarray, outs)]


def contract(a: Any, b: Any, n_terms: float, rng: np.random.Generator) -> np.ndarray:
    """Draws sums of `n_terms` products of entries of `a` and `b`."""
    x, y = (np.real(scale_values.as_samples(v)).astype(np.float64) for v in (a, b))
    mean = n_terms * x.mean() * y.mean()
    # Centred, so that a constant operand leaves no rounding noise.
    spread = n_terms * (np.mean(x**2) * np.mean(y**2) - (x.mean() * y.mean()) ** 2)
    normal = scale_values.unit_bag(np.float32, rng).samples
    return mean + math.sqrt(max(spread, 0)) * normal


def is_average(weights: Any, axes: tuple[int, ...], n_terms: int) -> bool:
    """Whether contracting `axes` with these weights takes a weighted mean, as attention does."""
    array = np.asarray(weights.samples if isinstance(weights, Bag) else weights)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return False
    array = array.astype(np.float32)
    if isinstance(weights, Bag):
        sums, tolerance = array.mean() * n_terms, 0.25
    else:
        sums, tolerance = array.sum(axis=axes), 0.02
    low = array.min(initial=0)
    return bool(low >= 0 and np.all(np.abs(sums - 1) < tolerance))


def is_one_hot(x: Any, axes: tuple[int, ...], n_terms: float) -> bool:
    """Whether contracting `axes` with `x` picks one entry at the most."""
    if isinstance(x, Bag):
        values, n_set = x.samples, np.real(x.samples.mean()) * n_terms  # Too sparse to be met: 0.
    else:
        values = np.asarray(x)
        n_set = np.real(values.sum(axis=axes)).max(initial=0) or np.inf
    return bool(n_set < 1.5 and np.all((values == 0) | (values == 1)))


def _dot_general(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    (axes_a, axes_b), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    n_terms = math.prod(shape[i] for i in axes_a)
    dtype = eqn.outvars[0].aval.dtype
    for weights, axes, other in ((data[0], axes_a, data[1]), (data[1], axes_b, data[0])):
        # In a trained network the things that attention averages are alike: the scale stays.
        if is_average(weights, tuple(axes), n_terms):
            return [_cast(other, dtype, rng)]
    return [Bag(contract(data[0], data[1], n_terms, rng).astype(dtype))]


def _conv(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    out = contract(data[0], data[1], conv_terms(eqn), rng)
    return [Bag(out.astype(eqn.outvars[0].aval.dtype))]


def conv_terms(eqn: Any) -> float:
    """Counts the products summed in one output of a convolution.

    The zeros that a transposed convolution puts between its inputs do not count.
    """
    kernel = eqn.invars[1].aval.shape
    out_axis = eqn.params["dimension_numbers"].rhs_spec[0]
    n_terms = math.prod(kernel) / kernel[out_axis]
    return max(n_terms / math.prod(eqn.params["lhs_dilation"]), 1)


def _reduction(op: Callable[..., np.ndarray]) -> BagRule:
    def rule(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
        samples = scale_values.as_samples(data[0])
        n = _n_reduced(eqn)
        n_draws = max(1, min(round(n), MAX_DRAWS))
        # The same rows for all reductions of a size: a variance is of what its mean is of.
        rows = np.random.default_rng([3, n_draws])
        out = samples
        for _ in range(n_draws - 1):
            out = op(out, samples[rows.permutation(N_SAMPLES)])
        if op is np.add:
            mean = np.mean(samples, dtype=np.float64)
            out = n * mean + (out - n_draws * mean) * math.sqrt(n / n_draws)
        return [Bag(out.astype(eqn.outvars[0].aval.dtype))]

    return rule


def _n_reduced(eqn: Any) -> float:
    shape = eqn.invars[0].aval.shape
    if "axes" in eqn.params:
        return math.prod(shape[axis] for axis in eqn.params["axes"])
    if "window_dimensions" in eqn.params:
        # Neighbours are alike: a window holds about the root of its size that is independent.
        return math.sqrt(math.prod(eqn.params["window_dimensions"]))
    return shape[eqn.params["axis"]] / 2  # A running sum, half-way.


def _window_sum(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    n_alike = _n_reduced(eqn)
    (sums,) = _reduction(np.add)(eqn, data, rng)
    return [Bag((sums.samples * n_alike).astype(sums.samples.dtype))]


def _mixture(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    """Joins or overwrites: later operands cover their own size, the first the rest."""
    dtype = eqn.outvars[0].aval.dtype
    size = math.prod(eqn.outvars[0].aval.shape)
    parts, room = [], size
    for x, var in list(zip(data, eqn.invars))[:0:-1]:
        if var.aval.dtype == dtype and var.aval.shape:
            parts.append((x, min(math.prod(var.aval.shape), room)))
            room -= parts[-1][1]
    return [scale_values.mixed([(data[0], room), *parts], rng)]


def _pad(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    inside, size = (math.prod(v.aval.shape) for v in (eqn.invars[0], eqn.outvars[0]))
    inside = min(inside, size)
    return [scale_values.mixed([(data[0], inside), (data[1], size - inside)], rng)]


def _uniform(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    """Random bits, and keys, which are never looked into."""
    outs = []
    for var in eqn.outvars:
        dtype = var.aval.dtype if jnp.issubdtype(var.aval.dtype, np.integer) else np.uint32
        high = np.iinfo(dtype).max
        outs.append(Bag(rng.integers(0, high, N_SAMPLES, dtype=dtype, endpoint=True)))
    return outs


def _position(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    """Positions along an axis, each as likely."""
    aval = eqn.outvars[0].aval
    if eqn.primitive.name == "iota":
        n = aval.shape[eqn.params["dimension"]]
    elif eqn.primitive.name == "axis_index":
        n = 1
    else:
        n = math.prod(eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"])
    return [Bag(rng.integers(0, max(n, 1), N_SAMPLES).astype(aval.dtype))]


def _elsewhere(eqn: Any, data: Any, i: int) -> Any:
    """Unpairs the slices of one array: they hold other entries than one another."""
    if eqn.primitive.name not in ("slice", "split"):
        return data
    start = eqn.params.get("start_indices", (i,))
    order = np.random.default_rng(list(start)).permutation(N_SAMPLES)
    return Bag(scale_values.as_samples(data)[order])


def _each(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Bag]:
    return [_cast(x, var.aval.dtype, rng) for x, var in zip(data, eqn.outvars)]


def _cast(data: Any, dtype: Any, rng: np.random.Generator) -> Bag:
    samples = scale_values.as_samples(data)
    if samples.dtype != dtype and not jnp.issubdtype(dtype, np.number):
        return scale_values.unit_bag(dtype, rng)
    return Bag(samples.astype(dtype))


def _looks_entrywise(eqn: Any) -> bool:
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    shape = eqn.outvars[0].aval.shape
    return all(
        (jnp.issubdtype(aval.dtype, np.number) or aval.dtype == bool)
        and (aval.shape == () or len(aval.shape) == len(shape))
        and all(n in (1, m) for n, m in zip(aval.shape, shape))
        for aval in avals
    )


_RULES: dict[str, BagRule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "reduce_sum": _reduction(np.add),
    "reduce_max": _reduction(np.maximum),
    "reduce_min": _reduction(np.minimum),
    "reduce_prod": _reduction(np.multiply),
    "reduce_and": _reduction(np.logical_and),
    "reduce_or": _reduction(np.logical_or),
    "reduce_window_sum": _window_sum,
    "reduce_window_max": _reduction(np.maximum),
    "reduce_window_min": _reduction(np.minimum),
    "cumsum": _reduction(np.add),
    "concatenate": _mixture,
    "dynamic_update_slice": _mixture,
    "scatter": _mixture,
    "scatter-add": _mixture,
    "scatter_add": _mixture,
    "pad": _pad,
    "sort": _each,
    "optimization_barrier": _each,
    "iota": _position,
    "axis_index": _position,
    "argmax": _position,
    "argmin": _position,
    "random_bits": _uniform,
    "random_seed": _uniform,
    "random_wrap": _uniform,
    "random_unwrap": _uniform,
    "random_split": _uniform,
    "random_fold_in": _uniform,
    "threefry2x32": _uniform,
    "rng_bit_generator": _uniform,
}
