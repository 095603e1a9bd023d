"""Runs a model on batches and yields its outputs."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from tekoa.core import batch as batches_lib
from tekoa.core import objective
from tekoa.core import step as steps
from tekoa.core.model import ModelFns
from tekoa.core.state import TrainState
from tekoa.loop.task import StopRequest
from tekoa.sharding.layout import Layout
from tekoa.sharding.placement import Placement


def predictions(
    model: ModelFns,
    state: TrainState,
    batches: Iterable[Any],
    *,
    split: objective.Split = batches_lib.split_batch,
    layout: Layout | None = None,
    stop_flag: StopRequest | None = None,
) -> Iterator[Any]:
    """Yields the outputs of the model for each batch, the same on all processes.

    Args:
        model: The model as pure functions.
        state: The state whose evaluation parameters are used.
        batches: The data; each process passes its own rows.
        split: Separates the inputs of a batch from its targets.
        layout: The mesh to run on.
        stop_flag: Polled at every batch; once set, there are no further outputs.
    """
    place, rng = Placement(layout), jax.random.key(0)
    step = place.jit_gathered(steps.make_predict_step(model, split=split))
    params, variables = None, {}
    for i, batch in enumerate(batches):
        if stop_flag is not None and stop_flag.is_set():
            return
        placed = place.batch(batch)
        if i == 0:
            inputs = split(placed)[0]
            params, variables = place.model(model, state.eval_params, state.variables, inputs)
            if state.carry is not None:
                carry = jax.jit(functools.partial(objective.new_carry, model))(rng, inputs)
                variables = objective.merge_carry(variables, carry)
        outputs, variables = step(params, variables, placed, jax.random.fold_in(rng, i))
        yield outputs
