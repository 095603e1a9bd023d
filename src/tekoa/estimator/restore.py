"""A stored step, of any format, made into a checkpoint that can be evaluated."""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import objective
from tekoa.core.model import ModelFns
from tekoa.core.state import TrainState, healthy
from tekoa.loop.checkpoint import Summary
from tekoa.store import errors, restoring, steps, walkback


def for_evaluation(path: str | os.PathLike[str], fns: ModelFns, inputs: tuple[Any, ...]) -> Summary:
    """Reads the parameters (the average, where there is one) and variables of a step.

    Args:
        path: The directory of one step, or a T5X file.
        fns: The model.
        inputs: Sample inputs.

    Raises:
        errors.MismatchError: If the step does not fit the model, with all differences.
    """
    params, variables = fns.init(jax.random.key(0), inputs)
    variables, carry = objective.without_carry(variables)
    opened = steps.open_step(path)
    index = opened.index
    item = "average" if any(name[0] == "average" for name in index.leaves) else "model_params"
    targets = {item: params}
    if "model_state" in index.items:
        targets["model_state"] = variables
    found = restoring.restore_step(opened, targets).items
    state = TrainState(
        step=jnp.asarray(index.step, jnp.int32),
        params=found[item],
        variables=found.get("model_state", variables),
        opt_state=(),
        average=None,
        carry=carry,
        rng=jax.random.key(0),
        sums={},
        health=healthy(),
    )
    return Summary(
        state=state,
        step=index.step,
        loss=jnp.full((), jnp.nan),
        grads=None,
        n_completed_steps=0,
        elapsed_time=0.0,
        metrics={"train": {}},
    )


def find_step(model_dir: pathlib.Path, checkpoint_path: str | None) -> pathlib.Path:
    """The step to evaluate or predict with: the one given, or the newest of the directory.

    Raises:
        errors.StoreError: If there is none.
    """
    where = model_dir
    if checkpoint_path is not None:
        where = pathlib.Path(checkpoint_path).expanduser().absolute()
        where = where.parent if where.is_file() else where
        if steps.is_step(where):
            return where
    found = walkback.newest_usable(where, _checked)
    if found is None:
        raise errors.StoreError(
            f"{where} has no checkpoint yet. Train first, or give --checkpoint_path."
        )
    return found.value


def _checked(path: str | os.PathLike[str]) -> pathlib.Path:
    steps.open_step(path)
    return pathlib.Path(path)
