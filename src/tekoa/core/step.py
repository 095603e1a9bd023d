"""The training step as a pure function: `step(state, batch) -> (state, output)`.

All training in this package runs the function created here; the caller compiles it.
`state.step` counts completed optimizer steps: gradient accumulation happens inside one.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from tekoa.core import batch as batches
from tekoa.core import metrics, nonfinite, objective, trees
from tekoa.core.loss import scale as loss_scale
from tekoa.core.loss.reduction import Reduction
from tekoa.core.model import ModelFns, Remat, Variables, cast_like, run_model, with_remat
from tekoa.core.state import Health, StepOutput, TrainState
from tekoa.core.trees import PyTree
from tekoa.core.update import average, gradients

Step = Callable[[TrainState, Any], tuple[TrainState, StepOutput]]


def init_state(
    model: ModelFns,
    optimizer: optax.GradientTransformation,
    rng: jax.Array,
    *,
    inputs: tuple[Any, ...],
    ema: float | None = None,
    metric_names: tuple[str, ...] = (),
    precision: objective.Precision = "float32",
) -> TrainState:
    """Creates the state before the first step.

    Args:
        model: The model; `tekoa.init_state` accepts one of any library.
        optimizer: Any optax transformation, or a triple.
        rng: A key. It is split in two: one key initialises the parameters, the other is the
            root key of all steps.
        inputs: Sample inputs of the model.
        ema: If set, the state has a moving average of the parameters.
        metric_names: Names of the metrics that the loss returns besides its value, and "loss" for
            the mean of the loss itself.
        precision: With "fp16", the state has the scale of the loss.

    Raises:
        TypeError: If a parameter is not a floating point array.
    """
    init_rng, state_rng = jax.random.split(rng)
    params, variables = model.init(init_rng, inputs)
    _check_params(params)
    variables, carry = objective.split_carry(variables)

    @jax.jit  # One program instead of one per leaf and operation.
    def make(params: PyTree, variables: Variables, carry: PyTree, rng: jax.Array) -> TrainState:
        opt_state = optimizer.init(params)
        average.check_ema(ema, opt_state)
        has_average = ema is not None or average.is_schedule_free(opt_state)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            variables=variables,
            opt_state=opt_state,
            average=params if has_average else None,
            carry=carry,
            rng=rng,
            sums=metrics.zeros(dict.fromkeys(metric_names)),
            health=Health.zero(),
            loss_scale=loss_scale.initial() if precision == "fp16" else None,
        )
        return jax.tree.map(donatable_copy, state)

    return make(params, variables, carry, state_rng)


def donatable_copy(x: Any) -> jax.Array:
    """Copies `x` so that it can be donated, and makes it strongly typed.

    A weakly typed state would compile the step twice.
    """
    x = jnp.copy(x)
    return x if trees.is_key(x) else x.astype(x.dtype)


def make_train_step(
    model: ModelFns,
    loss: objective.Loss | None,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    ema: float | None = None,
    precision: objective.Precision = "float32",
    on_nan: nonfinite.OnNan = "stop",
    keep_grads: bool = False,
    split: objective.Split = batches.split_batch,
    reduction: Reduction = "auto",
    remat: Remat | None = None,
    clip_norm: float | None = None,
    grad_noise: float | None = None,
) -> Step:
    """Creates the training step.

    Args:
        model: The model as pure functions.
        loss: `loss(*outputs, *targets)` returns a number, a `Mean(total, count)` (such as the
            sum over tokens and their number), or a pair of one of these and a dict of
            metrics. If None, the model's output is the loss.
        optimizer: Any optax transformation; `value`, `grad` and `value_fn` are passed to its
            update.
        accumulate: Number of microbatches whose gradients are accumulated for one update. The
            result is that of the full batch, for a loss that is a mean or a sum over rows.
        ema: Decay of the moving average of the parameters, updated once per step.
        precision: "bf16" runs the model in bfloat16, "fp16" in float16 with a dynamic scale of the
            loss; parameters and slots stay float32.
        on_nan: What to do at NaN or Inf in loss, gradients or update. "stop" keeps the state of
            the last good step in this and all later steps; "skip" omits the update; "count"
            applies it and counts the step; "ignore" applies it.
        keep_grads: If true, the output includes the gradients.
        split: Separates the inputs of a batch from its targets.
        reduction: Whether the loss is a "mean" or a "sum" over rows; only used to accumulate.
            "auto" finds out by evaluating the loss on a few made-up rows.
        remat: Which activations are computed again for the gradient, to save memory: "everything",
            "dots" for all but products with weights, or a policy of `jax.checkpoint_policies`.
        clip_norm: If the norm of all gradients is larger, they are scaled down to it.
        grad_noise: Standard deviation of normal noise that is added to the gradients.

    Returns:
        `step(state, batch) -> (state, StepOutput)`, a pure function. With `accumulate`, it raises
        `ReductionError` when it is traced if the loss is neither a mean nor a sum over rows.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check_choice("reduction", reduction, Reduction)
    _check_choice("on_nan", on_nan, nonfinite.OnNan)
    _check_choice("precision", precision, objective.Precision)
    _check_ranges(accumulate=accumulate, ema=ema, clip_norm=clip_norm, grad_noise=grad_noise)
    if remat is not None:
        model = with_remat(model, remat)
    loss_of = objective.Objective(
        model, loss, precision=precision, split=split, reduction=reduction
    )
    value_and_grad = objective.make_value_and_grad(loss_of, accumulate)
    value_alone = objective.make_value(loss_of, accumulate)
    tx = optax.with_extra_args_support(optimizer)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepOutput]:
        rng = jax.random.fold_in(state.rng, state.step)
        inputs = objective.merge_carry(state.variables, state.carry), batch, rng
        scale = loss_scale.scale_of(state) if precision == "fp16" else None
        value, grads, variables, means = value_and_grad(state.params, *inputs, scale)
        shaped = gradients.shape_gradients(grads, rng, clip_norm=clip_norm, noise=grad_noise)
        params, opt_state = _update(
            tx, state, shaped, value, lambda params: value_alone(params, *inputs)
        )
        new = _advance(state, params, opt_state, variables, means, ema)
        are_finite = trees.are_finite(grads)
        if scale is not None:
            new, are_finite = loss_scale.skip_overflow(state, new, value, are_finite)
        output = StepOutput(
            loss=value,
            gradients_l2norm=trees.global_norm(grads),
            weights_l2norm=trees.global_norm(new.params),
            grads=grads if keep_grads else None,
        )
        new = nonfinite.select_finite(
            state,
            new,
            value=value,
            grads=are_finite,
            params=trees.are_finite(new.params),
            on_nan=on_nan,
        )
        return new, output

    return step


def _update(
    tx: optax.GradientTransformationExtraArgs,
    state: TrainState,
    grads: PyTree,
    value: jax.Array,
    value_fn: Callable[[PyTree], jax.Array],
) -> tuple[PyTree, PyTree]:
    """Returns the parameters and the optimizer state after one update."""
    updates, opt_state = tx.update(
        grads, state.opt_state, state.params, value=value, grad=grads, value_fn=value_fn
    )
    params = trees.shard_like(state.params, optax.apply_updates(state.params, updates))
    opt_state = cast_like(state.opt_state, opt_state, "optimizer state")
    return params, trees.shard_like(state.opt_state, opt_state)


def _advance(
    state: TrainState,
    params: PyTree,
    opt_state: PyTree,
    variables: Variables,
    means: Mapping[str, metrics.Mean],
    ema: float | None,
) -> TrainState:
    """Returns the state after one more step, before any check for NaN or Inf."""
    variables, carry = objective.split_carry(variables)
    return state.replace(
        step=state.step + 1,
        params=params,
        variables=variables,
        opt_state=opt_state,
        average=average.updated_average(state.average, params, ema, opt_state),
        carry=carry,
        sums=_add_metrics(state.sums, means),
    )


def scan_steps(step: Step) -> Step:
    """Creates a function that runs `step` for each of several batches, in one `lax.scan`.

    Returns:
        `many_steps(state, batches) -> (state, output)`: the leaves of `batches` have a new leading
        axis, one entry per step; the output holds only the loss of the last step.
    """

    def one_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        state, output = step(state, batch)
        return state, output.loss

    def many_steps(state: TrainState, batches: Any) -> tuple[TrainState, StepOutput]:
        state, losses = jax.lax.scan(one_step, state, batches)
        return state, StepOutput(loss=losses[-1])

    return many_steps


def make_eval_step(
    model: ModelFns,
    metric_fns: Mapping[str, Callable[..., Any]],
    *,
    split: objective.Split = batches.split_batch,
) -> Callable[..., tuple[dict[str, metrics.Accumulator], Variables]]:
    """Creates `step(params, variables, batch, rng) -> (means, variables)`.

    Args:
        model: The model as pure functions.
        metric_fns: Name to `fn(*outputs, *targets)`, which returns a mean over the batch, one
            number per row, a `Mean(total, count)`, or an object with `merge` and `compute`, such
            as `Totals` or a metric of clu or metrax.
        split: Separates the inputs of a batch from its targets.
    """

    def step(params: PyTree, variables: Variables, batch: Any, rng: jax.Array):
        inputs, targets = split(batch)
        outputs, changed = run_model(model, params, variables, inputs, rng=rng, train=False)
        n_rows = batches.n_rows(inputs)
        means = {
            name: metrics.as_accumulator(fn(*outputs, *targets), n_rows, f"Metric {name!r}")
            for name, fn in metric_fns.items()
        }
        return means, changed

    return step


def make_predict_step(
    model: ModelFns, *, split: objective.Split = batches.split_batch
) -> Callable[..., tuple[Any, Variables]]:
    """Creates `step(params, variables, batch, rng) -> (outputs, variables)`."""

    def step(params: PyTree, variables: Variables, batch: Any, rng: jax.Array):
        inputs, _ = split(batch)
        outputs, changed = run_model(model, params, variables, inputs, rng=rng, train=False)
        return outputs[0] if len(outputs) == 1 else outputs, changed

    return step


def _add_metrics(sums: Mapping[str, metrics.Mean], means: Mapping[str, metrics.Mean]):
    if "loss" not in sums:
        means = {name: mean for name, mean in means.items() if name != "loss"}
    if sums.keys() != means.keys():
        raise ValueError(
            f"The loss returned the metrics {sorted(means)}, but the state was created for "
            f"{sorted(sums)}. Use init_state(..., metric_names=...)."
        )
    return metrics.merge(sums, means)


def _check_params(params: PyTree) -> None:
    for name, leaf in trees.flatten_named(params).items():
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"Parameter {name!r} has dtype {jnp.result_type(leaf)}, but only floating point "
                "arrays can be trained. Move it to the model's other variables."
            )


def _check_ranges(accumulate: int, ema: float | None, **positive: float | None) -> None:
    if accumulate < 1:
        raise ValueError(f"accumulate must be 1 or more, got {accumulate}.")
    if ema is not None and not 0 <= ema < 1:
        raise ValueError(f"ema must be in [0, 1), got {ema}.")
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}.")


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}.")
