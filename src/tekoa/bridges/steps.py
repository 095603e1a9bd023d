"""The functions of the pure step for a model of any library, and not only for `ModelFns`.

At run time each has the documentation of the function in `core.step` that it calls.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tekoa.bridges import any_model, optimizers
from tekoa.core import step as steps
from tekoa.core.model import ModelFns
from tekoa.core.state import TrainState
from tekoa.optim import named


def _transformation(optimizer: Any, fns: ModelFns) -> Any:
    if isinstance(optimizer, str):
        optimizer = named.without_model(optimizer)
    return optimizers.accepting_native(optimizers.as_transformation(optimizer), fns.native)


@functools.wraps(steps.init_state)
def init_state(
    model: Any, optimizer: Any, rng: jax.Array, *, inputs: tuple[Any, ...], **options: Any
) -> TrainState:
    """Creates the state before the first step, for a model of any library.

    The options are `ema`, which adds a moving average of the parameters, `metric_names`, the
    metrics that the loss returns, and `precision`, which must be that of the step.
    """
    fns = any_model.as_model_fns(model)
    return steps.init_state(fns, _transformation(optimizer, fns), rng, inputs=inputs, **options)


@functools.wraps(steps.make_train_step)
def make_train_step(
    model: Any, loss: Callable[..., Any] | None, optimizer: Any, **options: Any
) -> steps.Step:
    """Creates `step(state, batch) -> (state, StepOutput)`, a pure function for any library's model.

    The options are `accumulate`, `ema`, `precision`, `on_nan`, `keep_grads`, `split`, `reduction`,
    `remat`, `clip_norm` and `grad_noise`, as described in [Loops](loops.md).
    """
    fns = any_model.as_model_fns(model)
    return steps.make_train_step(fns, loss, _transformation(optimizer, fns), **options)


@functools.wraps(steps.make_eval_step)
def make_eval_step(model: Any, metric_fns: Mapping[str, Callable[..., Any]], **options: Any) -> Any:
    """Creates `step(params, variables, batch, rng) -> (means, variables)`; option: `split`."""
    return steps.make_eval_step(any_model.as_model_fns(model), metric_fns, **options)


@functools.wraps(steps.make_predict_step)
def make_predict_step(model: Any, **options: Any) -> Any:
    """Creates `step(params, variables, batch, rng) -> (outputs, variables)`; option: `split`."""
    return steps.make_predict_step(any_model.as_model_fns(model), **options)
