"""The one training step, pure: `step(state, batch) -> (state, output)`.

Everything that trains in this package runs the function made here; jit is the caller's.
`step` in the state counts completed optimizer steps: accumulation happens inside one.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from tekoa.core import batch as batches
from tekoa.core import guard, metrics, objective, trees
from tekoa.core.model import ModelFns, Variables, keep_form, run_model
from tekoa.core.state import StepOutput, TrainState, healthy
from tekoa.core.trees import PyTree

Step = Callable[[TrainState, Any], tuple[TrainState, StepOutput]]


def init_state(
    model: ModelFns,
    tx: optax.GradientTransformation,
    rng: jax.Array,
    *,
    inputs: tuple[Any, ...],
    ema: float | None = None,
    metric_names: tuple[str, ...] = (),
) -> TrainState:
    """Makes the state before the first step.

    Args:
        model: The model as pure functions.
        tx: The optimizer.
        rng: A key; one half makes the parameters, the other is the root of all steps.
        inputs: Sample inputs of the model.
        ema: If given, the state holds a moving average of the parameters.
        metric_names: Names of the metrics that the loss gives besides its value.

    Raises:
        TypeError: If a parameter is not a floating point array.
    """
    init_rng, state_rng = jax.random.split(rng)
    params, variables = model.init(init_rng, inputs)
    _check_params(params)
    variables, carry = objective.without_carry(variables)

    @jax.jit  # One program instead of one per leaf and operation.
    def made(params: PyTree, variables: Variables, carry: PyTree, rng: jax.Array) -> TrainState:
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            variables=variables,
            opt_state=tx.init(params),
            average=None if ema is None else params,
            carry=carry,
            rng=rng,
            sums=metrics.zeros(dict.fromkeys(metric_names)),
            health=healthy(),
        )
        return jax.tree.map(owned, state)

    return made(params, variables, carry, state_rng)


def owned(x: Any) -> jax.Array:
    """A copy that can be donated, and is not weakly typed: the step would compile twice."""
    x = jnp.copy(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.astype(x.dtype)


def make_train_step(
    model: ModelFns,
    loss: objective.Loss | None,
    tx: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    ema: float | None = None,
    precision: objective.Precision = "float32",
    on_nan: guard.OnNan = "stop",
    keep_grads: bool = False,
    split: objective.Split = batches.split_batch,
) -> Step:
    """Makes the training step.

    Args:
        model: The model as pure functions.
        loss: `loss(*outputs, *targets)` -> a number, a `Mean(total, count)` (such as the
            sum over tokens and their number), or a pair of one of these and a dict of
            metrics. None: the model's output is that already.
        tx: Any optax transformation; it is offered `value`, `grad` and `value_fn`.
        accumulate: Number of parts in which the batch is run, one after the other, before
            the one update. The result is that of the whole batch.
        ema: Decay of the moving average of the parameters, once per step.
        precision: "bf16" runs the model in bfloat16; parameters and slots stay float32.
        on_nan: What a loss or gradient that is not finite does. "stop" leaves this and all
            later states at the last good step; "skip" leaves out the update; "count" goes on and
            counts the step; "ignore" goes on.
        keep_grads: If true, the output holds the gradients.
        split: Tells the inputs of a batch from its targets.

    Returns:
        `step(state, batch) -> (state, StepOutput)`, a pure function.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check_choice("on_nan", on_nan, guard.OnNan)
    _check_choice("precision", precision, objective.Precision)
    if accumulate < 1:
        raise ValueError(f"accumulate must be 1 or more, got {accumulate}.")
    if ema is not None and not 0 <= ema < 1:
        raise ValueError(f"ema must be in [0, 1), got {ema}.")
    loss_of = objective.make_objective(model, loss, precision=precision, split=split)
    value_and_grad = objective.make_value_and_grad(loss_of, accumulate)
    value_alone = objective.make_value(loss_of, accumulate)
    tx = optax.with_extra_args_support(tx)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepOutput]:
        rng = jax.random.fold_in(state.rng, state.step)
        given = objective.with_carry(state.variables, state.carry), batch, rng
        value, grads, variables, found = value_and_grad(state.params, *given)
        updates, opt_state = tx.update(
            grads,
            state.opt_state,
            state.params,
            value=value,
            grad=grads,
            value_fn=lambda params: value_alone(params, *given),
        )
        params = optax.apply_updates(state.params, updates)
        variables, carry = objective.without_carry(variables)
        new = state.replace(
            step=state.step + 1,
            params=params,
            variables=variables,
            opt_state=keep_form(state.opt_state, opt_state, "optimizer state"),
            average=moved(state.average, params, ema),
            carry=carry,
            sums=_gathered(state.sums, found),
        )
        new = guard.guarded(
            state,
            new,
            value=value,
            grads=trees.are_finite(grads),
            params=trees.are_finite(params),
            on_nan=on_nan,
        )
        return new, StepOutput(
            loss=value,
            gradients_l2norm=trees.global_norm(grads),
            weights_l2norm=trees.global_norm(params),
            grads=grads if keep_grads else None,
        )

    return step


def make_eval_step(
    model: ModelFns,
    metric_fns: Mapping[str, Callable[..., Any]],
    *,
    split: objective.Split = batches.split_batch,
) -> Callable[..., tuple[dict[str, metrics.Mean], Variables]]:
    """Makes `step(params, variables, batch, rng) -> (means, variables)`.

    Args:
        model: The model as pure functions.
        metric_fns: Name to `fn(*outputs, *targets)`, which gives a mean over the batch, one
            number per row, or a `Mean(total, count)`.
        split: Tells the inputs of a batch from its targets.
    """

    def step(params: PyTree, variables: Variables, batch: Any, rng: jax.Array):
        inputs, targets = split(batch)
        outputs, changed = run_model(model, params, variables, inputs, rng=rng, train=False)
        n_rows = batches.n_rows(inputs)
        means = {
            name: metrics.as_mean(fn(*outputs, *targets), n_rows, f"Metric {name!r}")
            for name, fn in metric_fns.items()
        }
        return means, changed

    return step


def make_predict_step(
    model: ModelFns, *, split: objective.Split = batches.split_batch
) -> Callable[..., tuple[Any, Variables]]:
    """Makes `step(params, variables, batch, rng) -> (outputs, variables)`."""

    def step(params: PyTree, variables: Variables, batch: Any, rng: jax.Array):
        inputs, _ = split(batch)
        outputs, changed = run_model(model, params, variables, inputs, rng=rng, train=False)
        return outputs[0] if len(outputs) == 1 else outputs, changed

    return step


def moved(average: PyTree, params: PyTree, ema: float | None) -> PyTree:
    """Gives the average after a step; as it is where there is no `ema`."""
    if ema is None:
        return average
    if average is None:
        raise ValueError("ema is set, but the state has no average: init_state(..., ema=...).")
    return moving_average(average, params, ema)


def moving_average(average: PyTree, params: PyTree, decay: float) -> PyTree:
    """Moves an average of parameters one step: decay * average + (1 - decay) * params.

    >>> moving_average(jnp.float32(1.0), jnp.float32(2.0), 0.75)
    Array(1.25, dtype=float32)
    """
    return jax.tree.map(lambda a, p: (decay * a + (1 - decay) * p).astype(a.dtype), average, params)


def _gathered(sums: Mapping[str, metrics.Mean], found: Mapping[str, metrics.Mean]):
    if sums.keys() != found.keys():
        raise ValueError(
            f"The loss gave the metrics {sorted(found)}, the state was made for {sorted(sums)}."
        )
    return metrics.merge(sums, found)


def _check_params(params: PyTree) -> None:
    for name, leaf in trees.flatten_named(params).items():
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"Parameter {name!r} has dtype {jnp.result_type(leaf)}; only floating point "
                "arrays are learned. Put it among the model's other variables."
            )


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}.")
