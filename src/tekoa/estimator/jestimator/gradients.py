"""Gradients for the `train_step` of a model file: in parts of a batch, and in bfloat16.

`state.value_and_grad_apply_fn` calls the model as the flags request, so the step itself sees the
loss, the results and the gradients of the full batch.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.bridges import lora
from tekoa.core.model import cast_like
from tekoa.core.trees import PyTree, is_key
from tekoa.estimator.cli.flags import UsageError

# How a number grows with the rows of a batch: a mean, a sum over sqrt(rows), a sum.
_EXPONENTS = (0.0, 0.5, 1.0)
# Dropout makes the loss of made-up rows vary.
_TOLERANCE = 0.12

# `fn(params, variables, inputs, i)` -> (loss, (results, variables)), for part i of the batch.
LossFn = Callable[[PyTree, PyTree, Any, Any], tuple[jax.Array, tuple[Any, PyTree]]]


class Gradients:
    """How a step computes its gradients, and what an optimizer may ask for afterwards.

    Args:
        n_rows: Rows in the batch.
        n_parts: Number of parts in which it is processed.
        is_lowered: Whether the model runs in bfloat16.

    Attributes:
        value: The loss of the step; None before it is computed.
        value_fn: Computes the loss for other parameters.
    """

    def __init__(self, n_rows: int, n_parts: int = 1, *, is_lowered: bool = False):
        self._n_rows, self._n_parts, self._is_lowered = n_rows, n_parts, is_lowered
        self.value: jax.Array | None = None
        self.value_fn: Callable[[PyTree], jax.Array] | None = None

    def compute(
        self, fn: LossFn, params: PyTree, variables: PyTree, inputs: Any, *, keeps_variables: bool
    ) -> tuple[Any, PyTree]:
        """Returns `((loss, (results, variables)), gradients)` for the full batch.

        Args:
            fn: Computes the loss of a part.
            params: The parameters.
            variables: Other collections of the model.
            inputs: Arguments of the model; arrays with `n_rows` rows are split.
            keeps_variables: Whether the variables are running averages, which stay float32.
        """
        run = self._lowered(fn, keeps_variables) if self._is_lowered else fn
        if self._n_parts == 1:
            compute = jax.value_and_grad(run, has_aux=True)
            result = compute(params, variables, inputs, 0)
        else:
            arguments = _Arguments.of(inputs, self._n_rows)
            result = _in_parts(run, params, variables, arguments, self._n_parts)
        self.value = result[0][0]
        self.value_fn = lambda new: run(new, variables, inputs, 0)[0]
        return result

    def _lowered(self, fn: LossFn, keeps_variables: bool) -> LossFn:
        def run(params: PyTree, variables: PyTree, inputs: Any, i: Any):
            lowered = variables if keeps_variables else _cast(variables, jnp.bfloat16)
            arguments = _cast((params, inputs), jnp.bfloat16)
            loss, (results, changed) = fn(arguments[0], lowered, arguments[1], i)
            changed = cast_like({name: variables[name] for name in changed}, changed, "variables")
            return _cast((loss, (results, changed)), jnp.float32)

        return run


class LossRecord:
    """Replaces `Gradients` to record the loss of a step as a function of parameters.

    The step itself sees zeros, so that nothing else in it depends on these parameters.

    Args:
        params: The parameters.

    Attributes:
        losses: The losses of which the step requested the gradients.
        value: As in `Gradients`.
        value_fn: As in `Gradients`.
    """

    def __init__(self, params: PyTree):
        self._params = params
        self.losses: list[jax.Array] = []
        self.value: jax.Array | None = None
        self.value_fn: Callable[[PyTree], jax.Array] | None = None

    def compute(
        self, fn: LossFn, params: PyTree, variables: PyTree, inputs: Any, *, keeps_variables: bool
    ) -> tuple[Any, PyTree]:
        """Returns what `Gradients.compute` does, with zeros as the results and gradients."""
        del keeps_variables
        result = fn(self._params, variables, inputs, 0)
        self.losses.append(result[0])
        self.value = zero = jnp.zeros_like(result[0])
        self.value_fn = lambda new: zero
        # Settings among the results, such as a number of rows, stay as they are.
        return jax.tree.map(
            lambda x: jnp.zeros_like(x) if hasattr(x, "dtype") else x, (result, params)
        )


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    """Casts float32 to bfloat16, or back."""
    source = jnp.float32 if dtype == jnp.bfloat16 else jnp.bfloat16
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if getattr(x, "dtype", None) == source else x, tree
    )


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The arguments of a model; arrays with as many rows as the batch are `rows`."""

    n_rows: int
    leaves: list[Any]
    have_rows: list[bool]  # For each leaf.
    structure: Any

    @classmethod
    def of(cls, inputs: Any, n_rows: int) -> "_Arguments":
        leaves, structure = jax.tree.flatten(inputs)
        have_rows = [getattr(x, "shape", ())[:1] == (n_rows,) for x in leaves]
        return cls(n_rows, leaves, have_rows, structure)

    @property
    def rows(self) -> list[Any]:
        return list(itertools.compress(self.leaves, self.have_rows))

    def with_rows(self, rows: Iterable[Any]) -> Any:
        """Returns the arguments as the model receives them, with other rows."""
        remaining = iter(rows)
        pairs = zip(self.leaves, self.have_rows, strict=True)
        return self.structure.unflatten([next(remaining) if is_row else x for x, is_row in pairs])


def _in_parts(
    run: LossFn, params: PyTree, variables: PyTree, arguments: _Arguments, n_parts: int
) -> tuple[Any, PyTree]:
    """Runs the parts one after the other and combines their results to those of the batch."""
    rows = _split(arguments.rows, n_parts)
    by_row = _names_by_row(run, params, variables, arguments, n_parts)
    memory = _split({name: variables[name] for name in by_row}, n_parts)

    def part(params: PyTree, rest: PyTree, xs: Any):
        i_rows, i_memory, i = xs
        i_inputs = arguments.with_rows(i_rows)
        loss, (results, changed) = run(params, {**rest, **i_memory}, i_inputs, i)
        changed = {**rest, **i_memory, **changed}
        memory = {name: changed.pop(name) for name in by_row}
        return loss, (results, changed, memory)

    def body(carry: Any, xs: Any):
        total, rest = carry
        (loss, (results, rest, memory)), grads = jax.value_and_grad(part, has_aux=True)(
            params, rest, xs
        )
        return (jax.tree.map(jnp.add, total, grads), rest), (loss, results, memory)

    xs = (rows, memory, jnp.arange(n_parts))
    rest = {name: tree for name, tree in variables.items() if name not in by_row}
    zeros = jax.tree.map(jnp.zeros_like, params)
    (grads, rest), (losses, results, memory) = jax.lax.scan(body, (zeros, rest), xs)
    exponents = _find_exponents(run, params, variables, arguments, n_parts, by_row)
    loss, results = jax.tree.map(lambda x, p: _combine(x, p, n_parts), (losses, results), exponents)
    factor = n_parts ** (exponents[0] - 1)
    grads = jax.tree.map(lambda g: g * factor, grads)
    return (loss, (results, {**rest, **_merge(memory)})), grads


def _split(tree: PyTree, n_parts: int) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(n_parts, -1, *x.shape[1:]), tree)


def _merge(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _combine(parts: jax.Array, exponent: float, n_parts: int) -> jax.Array:
    if math.isnan(exponent):  # One result per row.
        return parts.reshape(-1, *parts.shape[2:])
    return parts.sum(0) * n_parts ** (exponent - 1)


def _names_by_row(
    run: LossFn, params: PyTree, variables: PyTree, arguments: _Arguments, n_parts: int
) -> list[str]:
    """Returns the collections with an entry per row, such as the memory of a recurrent model."""
    n_rows = arguments.n_rows
    candidates = [
        name
        for name, tree in variables.items()
        if jax.tree.leaves(tree)
        and name != lora.FROZEN
        and all(jnp.shape(x)[:1] == (n_rows,) for x in jax.tree.leaves(tree))
    ]
    cut = [x[: n_rows // n_parts] for x in arguments.rows]
    for name in candidates:
        # Running averages with as many entries as the batch has rows accept any number of rows.
        try:
            _, (_, changed) = jax.eval_shape(
                lambda rows: run(params, variables, arguments.with_rows(rows), 0), cut
            )
        except (TypeError, ValueError):
            return candidates
        if jax.tree.map(jnp.shape, {**variables, **changed}[name]) != jax.tree.map(
            jnp.shape, variables[name]
        ):
            return candidates
    return []


def _find_exponents(
    run: LossFn,
    params: PyTree,
    variables: PyTree,
    arguments: _Arguments,
    n_parts: int,
    by_row: list[str],
) -> Any:
    """Finds how the loss and each result grow with the rows, on made-up rows and the same twice.

    Returns:
        (exponent of the loss, those of the results); NaN for results that have rows.

    Raises:
        UsageError: If one grows in no known way.
    """
    n_rows = arguments.n_rows // n_parts
    rng = np.random.default_rng(0)
    made_up_params = jax.tree.map(lambda x: _made_up(rng, x, is_weight=True), params)
    made_up_frozen = {
        name: jax.tree.map(lambda x: _made_up(rng, x, is_weight=True), tree)
        for name, tree in variables.items()
        if name == lora.FROZEN
    }
    pairs = zip(arguments.leaves, arguments.have_rows, strict=True)
    leaves = [_made_up(rng, x[:n_rows] if is_row else x) for x, is_row in pairs]
    made_up = dataclasses.replace(arguments, leaves=leaves)

    def values(n_copies: int) -> Any:
        rows = [np.concatenate([x] * n_copies) for x in made_up.rows]
        some = {
            name: jax.tree.map(
                lambda x, by=name in by_row: jnp.zeros(
                    (n_copies * n_rows, *x.shape[1:]) if by else x.shape, x.dtype
                ),
                tree,
            )
            for name, tree in variables.items()
        }
        some.update(made_up_frozen)
        loss, (results, _) = run(made_up_params, some, made_up.with_rows(rows), 0)
        return loss, results

    with jax.ensure_compile_time_eval():
        once, twice = (jax.device_get(jax.jit(lambda n=n: values(n))()) for n in (1, 2))
    return jax.tree.map(_exponent, once, twice)


def _made_up(rng: np.random.Generator, x: Any, *, is_weight: bool = False) -> Any:
    if not hasattr(x, "dtype"):
        return x  # A setting, such as the method to call.
    if is_key(x):
        with jax.ensure_compile_time_eval():  # Not traced with the step.
            return jax.random.key(0)
    shape, dtype = jnp.shape(x), jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return rng.integers(0, 2, shape).astype(dtype)
    if is_weight:
        return (rng.normal(size=shape) / math.sqrt(max(1, math.prod(shape[:-1])))).astype(dtype)
    return rng.uniform(0.1, 0.9, shape).astype(dtype)


def _exponent(once: Any, twice: Any) -> float:
    if np.shape(once) != np.shape(twice):
        return math.nan
    ratio = float(np.sum(twice)) / float(np.sum(once)) if np.all(once) else 1.0
    exponent = math.log2(ratio) if ratio > 0 and math.isfinite(ratio) else math.nan
    nearest = min(_EXPONENTS, key=lambda p: abs(p - exponent))
    if not abs(nearest - exponent) <= _TOLERANCE:
        raise UsageError(
            "--accumulate cannot combine the parts of a batch: the loss of this model, or a "
            "result that it returns with the loss, is neither a mean nor a sum over rows. On "
            f"made-up rows it is {float(np.sum(once)):.4g}, and {float(np.sum(twice)):.4g} on the "
            "same rows twice."
        )
    return nearest
