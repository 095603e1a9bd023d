"""Runs single operations on `Samples`: arrays of which only the distribution is known.

Elementwise operations are applied to the samples. The others have a rule here for the
resulting distribution: moving entries keeps it, a sum over n entries adds n independent
ones, a contraction becomes a normal with the right moments.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tekoa.optim.scales import values as values_lib
from tekoa.optim.scales.values import N_SAMPLES, Samples

SamplesRule = Callable[[Any, list[Any], np.random.Generator], list[Samples]]

MAX_DRAWS = 32  # Entries drawn for a reduction; the rest follows from the moments.
# fmt: off
# These cannot run outside their mesh, so they run on samples even if the data is known.
MESH_OPS = {
    "axis_index", "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather",
    "all_to_all", "all_gather_invariant", "reduce_scatter", "pvary", "pcast", "pbroadcast",
}
_MOVES = MESH_OPS | {
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice",
    "rev", "copy", "copy_p", "gather", "sharding_constraint", "reduce_precision", "split", "top_k",
    "approx_top_k", "cummax", "cummin",
}
# fmt: on


def execute(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    """Returns samples of an equation's outputs; `data` has an array or `Samples` per input."""
    name = eqn.primitive.name
    if name in _RULES:
        return _RULES[name](eqn, data, rng)
    if name in _MOVES and data:
        return [
            _cast(_unpair_slices(eqn, data[0], i), var.aval.dtype, rng)
            for i, var in enumerate(eqn.outvars)
        ]
    outs = _run_elementwise(eqn, data) if data and _looks_elementwise(eqn) else None
    return outs or [values_lib.unit_samples(var.aval.dtype, rng) for var in eqn.outvars]


def _run_elementwise(eqn: Any, data: list[Any]) -> list[Samples] | None:
    samples = [jnp.asarray(values_lib.as_samples(x)) for x in data]
    try:
        out = eqn.primitive.bind(*samples, **eqn.params)
    except (TypeError, ValueError, IndexError):
        return None  # It keeps the shape but is not elementwise, like cholesky.
    outs = out if eqn.primitive.multiple_results else [out]
    # Samples of rows are independent, so a mask may leave an empty row: 0 / 0.
    return [Samples(np.where(np.isnan(x), 0, x).astype(x.dtype)) for x in map(np.asarray, outs)]


def contract(a: Any, b: Any, n_terms: float, rng: np.random.Generator) -> np.ndarray:
    """Draws sums of `n_terms` products of entries of `a` and `b`."""
    x, y = (np.real(values_lib.as_samples(v)).astype(np.float64) for v in (a, b))
    mean = n_terms * x.mean() * y.mean()
    # Centred, so that a constant operand leaves no rounding noise.
    spread = n_terms * (np.mean(x**2) * np.mean(y**2) - (x.mean() * y.mean()) ** 2)
    normal = values_lib.unit_samples(np.float32, rng).samples
    return mean + math.sqrt(max(spread, 0)) * normal


def is_average(weights: Any, axes: tuple[int, ...], n_terms: int) -> bool:
    """Whether a contraction of `axes` with these weights is a weighted mean, as in attention."""
    array = np.asarray(weights.samples if isinstance(weights, Samples) else weights)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return False
    array = array.astype(np.float32)
    if isinstance(weights, Samples):
        sums, tolerance = array.mean() * n_terms, 0.25
    else:
        sums, tolerance = array.sum(axis=axes), 0.02
    return bool(array.min(initial=0) >= 0 and np.all(np.abs(sums - 1) < tolerance))


def is_one_hot(x: Any, axes: tuple[int, ...], n_terms: float) -> bool:
    """Whether a contraction of `axes` with `x` selects at most one entry."""
    if isinstance(x, Samples):
        # The ones may be too sparse to be sampled at all.
        values, n_ones = x.samples, np.real(x.samples.mean()) * n_terms
    else:
        values = np.asarray(x)
        n_ones = np.real(values.sum(axis=axes)).max(initial=0) or np.inf
    return bool(n_ones < 1.5 and np.all((values == 0) | (values == 1)))


def _dot_general(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    (axes_a, axes_b), _ = eqn.params["dimension_numbers"]
    n_terms = math.prod(eqn.invars[0].aval.shape[i] for i in axes_a)
    dtype = eqn.outvars[0].aval.dtype
    for weights, axes, other in ((data[0], axes_a, data[1]), (data[1], axes_b, data[0])):
        # In a trained network the averaged values are similar, so the scale stays.
        if is_average(weights, tuple(axes), n_terms):
            return [_cast(other, dtype, rng)]
    return [Samples(contract(data[0], data[1], n_terms, rng).astype(dtype))]


def _conv(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    out = contract(data[0], data[1], conv_terms(eqn), rng)
    return [Samples(out.astype(eqn.outvars[0].aval.dtype))]


def conv_terms(eqn: Any) -> float:
    """Counts the products summed in one output of a convolution.

    The zeros that a transposed convolution inserts between its inputs do not count.
    """
    kernel = eqn.invars[1].aval.shape
    out_axis = eqn.params["dimension_numbers"].rhs_spec[0]
    n_terms = math.prod(kernel) / kernel[out_axis]
    return max(n_terms / math.prod(eqn.params["lhs_dilation"]), 1)


def _reduction(op: Callable[..., np.ndarray]) -> SamplesRule:
    def rule(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
        samples = values_lib.as_samples(data[0])
        n = _n_reduced(eqn)
        n_draws = max(1, min(round(n), MAX_DRAWS))
        # All reductions of a size draw the same entries, so that a variance matches its mean.
        shared_rng = np.random.default_rng([3, n_draws])
        out = samples
        for _ in range(n_draws - 1):
            out = op(out, samples[shared_rng.permutation(N_SAMPLES)])
        if op is np.add:
            mean = np.mean(samples, dtype=np.float64)
            out = n * mean + (out - n_draws * mean) * math.sqrt(n / n_draws)
        return [Samples(out.astype(eqn.outvars[0].aval.dtype))]

    return rule


def _n_reduced(eqn: Any) -> float:
    shape = eqn.invars[0].aval.shape
    if "axes" in eqn.params:
        return math.prod(shape[axis] for axis in eqn.params["axes"])
    if "window_dimensions" in eqn.params:
        # Neighbours are similar: about the root of the window size is independent.
        return math.sqrt(math.prod(eqn.params["window_dimensions"]))
    return shape[eqn.params["axis"]] / 2  # A cumulative sum, on average.


def _window_sum(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    (sums,) = _reduction(np.add)(eqn, data, rng)
    return [Samples((sums.samples * _n_reduced(eqn)).astype(sums.samples.dtype))]


def _mixture(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    """Joins or overwrites: later operands contribute their size, the first one the rest."""
    dtype = eqn.outvars[0].aval.dtype
    remaining = math.prod(eqn.outvars[0].aval.shape)
    later = []
    for x, var in list(zip(data, eqn.invars))[:0:-1]:
        if var.aval.dtype == dtype and var.aval.shape:
            later.append((x, min(math.prod(var.aval.shape), remaining)))
            remaining -= later[-1][1]
    return [values_lib.mix([(data[0], remaining), *later], rng)]


def _pad(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    size = math.prod(eqn.outvars[0].aval.shape)
    inside = min(math.prod(eqn.invars[0].aval.shape), size)
    return [values_lib.mix([(data[0], inside), (data[1], size - inside)], rng)]


def _uniform(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    """Draws random bits, also in place of keys."""
    outs = []
    for var in eqn.outvars:
        dtype = var.aval.dtype if jnp.issubdtype(var.aval.dtype, np.integer) else np.uint32
        high = np.iinfo(dtype).max
        outs.append(Samples(rng.integers(0, high, N_SAMPLES, dtype=dtype, endpoint=True)))
    return outs


def _position(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    """Draws positions along an axis, all equally likely."""
    aval = eqn.outvars[0].aval
    if eqn.primitive.name == "iota":
        n = aval.shape[eqn.params["dimension"]]
    elif eqn.primitive.name == "axis_index":
        n = 1
    else:
        n = math.prod(eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"])
    return [Samples(rng.integers(0, max(n, 1), N_SAMPLES).astype(aval.dtype))]


def _unpair_slices(eqn: Any, data: Any, i: int) -> Any:
    """Permutes the samples of a slice, as different slices have different entries."""
    if eqn.primitive.name not in ("slice", "split"):
        return data
    start = eqn.params.get("start_indices", (i,))
    order = np.random.default_rng(list(start)).permutation(N_SAMPLES)
    return Samples(values_lib.as_samples(data)[order])


def _keep_each(eqn: Any, data: list[Any], rng: np.random.Generator) -> list[Samples]:
    return [_cast(x, var.aval.dtype, rng) for x, var in zip(data, eqn.outvars)]


def _cast(data: Any, dtype: Any, rng: np.random.Generator) -> Samples:
    samples = values_lib.as_samples(data)
    if samples.dtype != dtype and not jnp.issubdtype(dtype, np.number):
        return values_lib.unit_samples(dtype, rng)
    return Samples(samples.astype(dtype))


def _looks_elementwise(eqn: Any) -> bool:
    shape = eqn.outvars[0].aval.shape
    return all(
        (jnp.issubdtype(aval.dtype, np.number) or aval.dtype == bool)
        and (aval.shape == () or len(aval.shape) == len(shape))
        and all(n in (1, m) for n, m in zip(aval.shape, shape))
        for aval in (v.aval for v in (*eqn.invars, *eqn.outvars))
    )


_RULES: dict[str, SamplesRule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "reduce_and": _reduction(np.logical_and),
    "reduce_or": _reduction(np.logical_or),
    "reduce_prod": _reduction(np.multiply),
    "reduce_window_sum": _window_sum,
    "pad": _pad,
    **dict.fromkeys(["reduce_sum", "cumsum"], _reduction(np.add)),
    **dict.fromkeys(["reduce_max", "reduce_window_max"], _reduction(np.maximum)),
    **dict.fromkeys(["reduce_min", "reduce_window_min"], _reduction(np.minimum)),
    **dict.fromkeys(["concatenate", "dynamic_update_slice"], _mixture),
    **dict.fromkeys(["scatter", "scatter-add", "scatter_add"], _mixture),
    **dict.fromkeys(["sort", "optimization_barrier"], _keep_each),
    **dict.fromkeys(["iota", "axis_index", "argmax", "argmin"], _position),
    **dict.fromkeys(["random_bits", "random_seed", "random_wrap", "random_unwrap"], _uniform),
    **dict.fromkeys(["random_split", "random_fold_in"], _uniform),
    **dict.fromkeys(["threefry2x32", "rng_bit_generator"], _uniform),
}
