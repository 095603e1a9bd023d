"""The loss of a batch as a pure function of the parameters, with gradient accumulation.

A loss is a total and a count, summed separately so that microbatches add up to the loss of the
full batch, for means over rows and over tokens alike.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tekoa.core import batch as batches
from tekoa.core import metrics
from tekoa.core.loss import scale as loss_scale
from tekoa.core.loss.reduction import LOSS, Reduction, find_reductions, split_metrics
from tekoa.core.model import UNTRAINED, ModelFns, Variables, cast_like, run_model
from tekoa.core.trees import PyTree

Precision = Literal["float32", "bf16", "fp16"]
HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
Loss = Callable[..., Any]
Split = Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]

CARRY = "carry"


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a batch as a function of the parameters.

    Attributes:
        model: The model as pure functions.
        loss: As for `make_train_step`.
        precision: As for `make_train_step`.
        split: Separates the inputs of a batch from its targets.
        reduction: As for `make_train_step`.
    """

    model: ModelFns
    loss: Loss | None
    precision: Precision = "float32"
    split: Split = batches.split_batch
    reduction: Reduction = "auto"

    def __call__(self, params: PyTree, variables: Variables, batch: Any, rng: jax.Array):
        """Returns `(total, (count, variables, metrics))`; the loss is total / count.

        The metrics include the loss itself, unless the loss function returns one of that name.
        """
        outputs, targets, changed = self._forward(params, variables, batch, rng)
        if self.loss is not None:
            value = self.loss(*outputs, *targets)
        else:
            value = outputs[0] if len(outputs) == 1 else outputs
        advice = "Take the mean over the batch."
        if self.loss is None:
            advice = "Without loss=, the model must return the loss: pass loss=, or a mean."
        mean, means = _read_loss(value, batches.n_rows(self.split(batch)[0]), advice)
        return mean.total, (mean.count, changed, means)

    def _forward(self, params: PyTree, variables: Variables, batch: Any, rng: jax.Array):
        """Returns the model's outputs, the targets, and the changed variables."""
        half = HALVES.get(self.precision)

        def lower(tree: PyTree) -> PyTree:
            return tree if half is None else _cast(tree, jnp.float32, half)

        inputs, targets = self.split(batch)
        # Running averages stay float32: 16 bits would lose their small updates.
        lowered = {k: lower(v) if k in (CARRY, UNTRAINED) else v for k, v in variables.items()}
        outputs, changed = run_model(
            self.model, lower(params), lowered, lower(inputs), rng=rng, train=True
        )
        if UNTRAINED in variables:
            changed[UNTRAINED] = variables[UNTRAINED]
        if half is not None:
            outputs = _cast(outputs, half, jnp.float32)
            changed = cast_like(dict(variables), changed, "variables")
        return outputs, targets, changed

    def reductions(
        self, n_parts: int, params: PyTree, variables: Variables, batch: Any, rng: jax.Array
    ) -> dict[str, Reduction]:
        """Returns how the loss (under `LOSS`) and its metrics combine from `n_parts` parts.

        Raises:
            ReductionError: If they do not; see `loss.reduction.find_reductions`.
        """
        if self.reduction != "auto":
            return {LOSS: self.reduction, "loss": self.reduction}

        def arguments(variables: Variables, batch: Any) -> tuple[Any, ...]:
            outputs, targets, _ = self._forward(params, variables, batch, rng)
            if self.loss is None and isinstance(split_metrics(outputs)[0], metrics.Mean):
                return ()
            return (*outputs, *targets)

        rest, carry = split_carry(variables)
        parts = batches.microbatches((carry, batch), n_parts)
        i_carry, i_batch = jax.tree.map(lambda x: x[0], parts)
        whole = jax.eval_shape(arguments, variables, batch)
        if self.loss is None and not whole:
            return {LOSS: "mean"}  # By declaration.
        part = jax.eval_shape(arguments, merge_carry(rest, i_carry), i_batch)
        reductions = find_reductions(self.loss, whole, part)
        return {"loss": reductions[LOSS], **reductions}


def _read_loss(
    value: Any, n_rows: int, advice: str
) -> tuple[metrics.Mean, dict[str, metrics.Mean]]:
    loss, metric_values = split_metrics(value)
    if not isinstance(loss, metrics.Mean):
        dtype = getattr(loss, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or jnp.shape(loss):
            kind = type(loss).__name__ if dtype is None else f"{dtype} of shape {jnp.shape(loss)}"
            raise TypeError(
                "The loss must be a floating point number, a Mean(total, count), or a pair of one "
                f"of these and a dict of metrics; got {kind}. {advice}"
            )
    metric_values = {"loss": loss, **metric_values}
    if not isinstance(loss, metrics.Mean):
        # All microbatches have the same number of rows: each counts as one.
        loss = metrics.Mean(loss, jnp.ones((), jnp.float32))
    return metrics.as_mean(loss, n_rows, "The loss"), {
        name: metrics.as_mean(x, n_rows, f"Metric {name!r}") for name, x in metric_values.items()
    }


def make_value_and_grad(objective: Objective, n_parts: int) -> Callable[..., Any]:
    """Creates `f(params, variables, batch, rng, scale) -> (loss, gradients, variables, metrics)`.

    The `scale`, if not None, is that of the loss while gradients are computed; the results are
    those of the loss without it.

    Args:
        objective: The loss.
        n_parts: Number of microbatches. They run one after the other, so only the
            activations of one are in memory.
    """

    def value_and_grad(
        params: PyTree,
        variables: Variables,
        batch: Any,
        rng: jax.Array,
        scale: jax.Array | None = None,
    ):
        if scale is None:
            part = jax.value_and_grad(objective, has_aux=True)
        else:
            part = loss_scale.scaled_value_and_grad(objective, scale)
        if n_parts == 1:
            (total, (count, variables, means)), grads = part(params, variables, batch, rng)
        else:
            reductions = objective.reductions(n_parts, params, variables, batch, rng)
            sums, variables = _sum_parts(part, n_parts, params, variables, batch, rng)
            (total, (count, means)), grads = sums
            count, means = _combine(count, means, reductions, n_parts)
        return total / count, jax.tree.map(lambda g: g / count, grads), variables, means

    return value_and_grad


def _combine(
    count: jax.Array,
    means: dict[str, metrics.Mean],
    reductions: Mapping[str, Reduction],
    n_parts: int,
) -> tuple[jax.Array, dict[str, metrics.Mean]]:
    """Turns means over the parts into sums for a loss and metrics that are sums over rows."""
    if reductions[LOSS] == "sum":
        count = count / n_parts
    return count, {
        name: mean._replace(total=mean.total * n_parts) if reductions.get(name) == "sum" else mean
        for name, mean in means.items()
    }


def make_value(objective: Objective, n_parts: int) -> Callable[..., jax.Array]:
    """Creates `f(params, variables, batch, rng) -> loss`, for line searches."""

    def part(*args: Any):
        return objective(*args), ()

    def value(params: PyTree, variables: Variables, batch: Any, rng: jax.Array) -> jax.Array:
        if n_parts == 1:
            total, (count, *_) = objective(params, variables, batch, rng)
        else:
            reductions = objective.reductions(n_parts, params, variables, batch, rng)
            ((total, (count, _)), _), _ = _sum_parts(part, n_parts, params, variables, batch, rng)
            count, _ = _combine(count, {}, reductions, n_parts)
        return total / count

    return value


def _sum_parts(
    part: Callable[..., Any], n_parts: int, params: PyTree, variables: Variables, batch: Any, rng
) -> tuple[Any, Variables]:
    """Adds up the results of `part` over microbatches; variables pass from one to the next."""
    variables = dict(variables)
    carry = batches.microbatches(variables.pop(CARRY, None), n_parts)

    def run(variables: Variables, carry: PyTree, i_batch: Any, i: jax.Array):
        (total, (count, variables, means)), grads = part(
            params, merge_carry(variables, carry), i_batch, jax.random.fold_in(rng, i)
        )
        rest, carry = split_carry(variables)
        return ((total, (count, means)), grads), rest, carry

    def add(sums_and_variables: Any, xs: Any):
        sums, variables = sums_and_variables
        results, variables, carry = run(variables, *xs)
        return (jax.tree.map(jnp.add, sums, results), variables), carry

    parts = (carry, batches.microbatches(batch, n_parts), jnp.arange(n_parts))
    shapes, *_ = jax.eval_shape(run, variables, *jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (sums, variables), carry = jax.lax.scan(add, (zeros, variables), parts)
    return sums, merge_carry(variables, batches.undo_microbatches(carry))


def merge_carry(variables: Variables, carry: PyTree) -> dict[str, PyTree]:
    """Adds the carry, if there is one, to the variables."""
    return dict(variables) if carry is None else {**variables, CARRY: carry}


def split_carry(variables: Variables) -> tuple[dict[str, PyTree], PyTree]:
    """Separates the carry, or None, from the other variables."""
    return {k: v for k, v in variables.items() if k != CARRY}, variables.get(CARRY)


def new_carry(model: ModelFns, rng: jax.Array, inputs: tuple[Any, ...]) -> PyTree:
    """Returns the carry before the first batch; jitted, nothing else of the model is computed."""
    return split_carry(model.init(rng, inputs)[1])[1]


def _cast(tree: PyTree, source: Any, target: Any) -> PyTree:
    return jax.tree.map(
        lambda x: jnp.asarray(x, target) if jnp.result_type(x) == source else x, tree
    )
