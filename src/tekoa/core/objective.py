"""The loss of a batch as a pure function of the parameters, in parts if need be.

A loss is a total and a count, kept apart so that the parts of a batch add up to what the
whole batch gives, for means over rows and over tokens alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tekoa.core import batch as batches
from tekoa.core import metrics
from tekoa.core.model import ModelFns, Variables, keep_form, run_model
from tekoa.core.trees import PyTree

Precision = Literal["float32", "bf16"]
Loss = Callable[..., Any]
Split = Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]

CARRY = "carry"


def make_objective(
    model: ModelFns,
    loss: Loss | None,
    *,
    precision: Precision = "float32",
    split: Split = batches.split_batch,
) -> Callable[..., Any]:
    """Makes `f(params, variables, batch, rng) -> (total, (count, variables, metrics))`.

    The loss is total / count; the two are kept apart so that parts of a batch add up.
    """
    is_lowered = precision == "bf16"

    def lower(tree: PyTree) -> PyTree:
        return _cast(tree, jnp.float32, jnp.bfloat16) if is_lowered else tree

    def objective(params: PyTree, variables: Variables, batch: Any, rng: jax.Array):
        inputs, targets = split(batch)
        # Running averages stay float32: bfloat16 would swallow their small moves.
        rest, carry = without_carry(variables)
        given = with_carry(rest, lower(carry))
        outputs, changed = run_model(
            model, lower(params), given, lower(inputs), rng=rng, train=True
        )
        if is_lowered:
            outputs = _cast(outputs, jnp.bfloat16, jnp.float32)
            changed = keep_form(dict(variables), changed, "variables")
        if loss is not None:
            value = loss(*outputs, *targets)
        else:
            value = outputs[0] if len(outputs) == 1 else outputs
        mean, found = _read_loss(value, batches.n_rows(inputs))
        return mean.total, (mean.count, changed, found)

    return objective


def _read_loss(given: Any, n_rows: int) -> tuple[metrics.Mean, dict[str, metrics.Mean]]:
    found: Mapping[str, Any] = {}
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, found = given
    if not isinstance(given, metrics.Mean):
        _check_number(given)
        # All parts of a batch have the same number of rows: each counts as one.
        given = metrics.Mean(given, jnp.ones((), jnp.float32))
    return metrics.as_mean(given, n_rows, "The loss"), {
        name: metrics.as_mean(value, n_rows, f"Metric {name!r}") for name, value in found.items()
    }


def _check_number(given: Any) -> None:
    dtype = getattr(given, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.shape(given) == ():
        return
    seen = f"{dtype} of shape {jnp.shape(given)}" if dtype is not None else type(given).__name__
    raise TypeError(
        "The loss must be a floating point number, a Mean(total, count), or a pair of one of these "
        f"and a dict of metrics; got {seen}. Take the mean over the batch."
    )


def make_value_and_grad(objective: Callable[..., Any], n_parts: int) -> Callable[..., Any]:
    """Makes `f(params, variables, batch, rng)` -> loss, gradients, variables, metrics.

    Args:
        objective: As `make_objective` makes it.
        n_parts: In how many parts the batch is run, one after the other, so that only one
            part's activations are in memory.
    """
    part = jax.value_and_grad(objective, has_aux=True)

    def whole(params: PyTree, variables: Variables, batch: Any, rng: jax.Array):
        if n_parts == 1:
            (total, (count, variables, found)), grads = part(params, variables, batch, rng)
        else:
            sums, variables = _summed(part, n_parts, params, variables, batch, rng)
            (total, (count, found)), grads = sums
        return total / count, jax.tree.map(lambda g: g / count, grads), variables, found

    return whole


def make_value(objective: Callable[..., Any], n_parts: int) -> Callable[..., jax.Array]:
    """Makes `f(params, variables, batch, rng) -> loss`, for line searches."""

    def part(*args: Any):
        return objective(*args), ()

    def whole(params: PyTree, variables: Variables, batch: Any, rng: jax.Array) -> jax.Array:
        if n_parts == 1:
            total, (count, *_) = objective(params, variables, batch, rng)
        else:
            ((total, (count, _)), _), _ = _summed(part, n_parts, params, variables, batch, rng)
        return total / count

    return whole


def _summed(
    part: Callable[..., Any], n_parts: int, params: PyTree, variables: Variables, batch: Any, rng
) -> tuple[Any, Variables]:
    """Adds up what `part` gives over the parts of a batch; variables pass through them all."""
    variables = dict(variables)
    carry = batches.microbatches(variables.pop(CARRY, None), n_parts)

    def run(variables: Variables, carry: PyTree, i_batch: Any, i: jax.Array):
        (total, (count, variables, found)), grads = part(
            params, with_carry(variables, carry), i_batch, jax.random.fold_in(rng, i)
        )
        rest, carry = without_carry(variables)
        return ((total, (count, found)), grads), rest, carry

    def one(sums_and_variables: Any, xs: Any):
        sums, variables = sums_and_variables
        found, variables, carry = run(variables, *xs)
        return (jax.tree.map(jnp.add, sums, found), variables), carry

    parts = (carry, batches.microbatches(batch, n_parts), jnp.arange(n_parts))
    shapes, *_ = jax.eval_shape(run, variables, *jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (sums, variables), carry = jax.lax.scan(one, (zeros, variables), parts)
    return sums, with_carry(variables, batches.undo_microbatches(carry))


def with_carry(variables: Variables, carry: PyTree) -> dict[str, PyTree]:
    """Puts the carry among the variables, where there is one."""
    return dict(variables) if carry is None else {**variables, CARRY: carry}


def without_carry(variables: Variables) -> tuple[dict[str, PyTree], PyTree]:
    """Tells the carry from the other variables."""
    return {k: v for k, v in variables.items() if k != CARRY}, variables.get(CARRY)


def _cast(tree: PyTree, source: Any, target: Any) -> PyTree:
    return jax.tree.map(
        lambda x: jnp.asarray(x, target) if jnp.result_type(x) == source else x, tree
    )
