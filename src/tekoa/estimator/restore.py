"""A stored step, of any format, made into a checkpoint that can be evaluated."""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import hosts, objective
from tekoa.core.model import ModelFns
from tekoa.core.sharding import Layout
from tekoa.core.state import TrainState, healthy
from tekoa.core.trees import PyTree
from tekoa.estimator.config import UsageError
from tekoa.loop.checkpoint import Summary
from tekoa.loop.placement import Placement
from tekoa.store import names, restoring, steps, together, walkback


def for_evaluation(
    path: str | os.PathLike[str] | None,
    fns: ModelFns,
    inputs: tuple[Any, ...],
    layout: Layout | None = None,
) -> Summary:
    """Reads the parameters (the average, where there is one) and variables of a step.

    Args:
        path: The directory of one step; None leaves the model as initialised.
        fns: The model.
        inputs: Sample inputs.
        layout: The mesh that arrays are read onto, each shard where it belongs.

    Raises:
        errors.MismatchError: If the step does not fit the model, with all differences.
    """
    params, variables = Placement(layout).new_model(fns, inputs)
    variables, carry = objective.without_carry(variables)
    step = 0
    if path is not None:
        step, params, variables = _stored(path, params, variables)
    state = TrainState(
        step=jnp.asarray(step, jnp.int32),
        params=params,
        variables=variables,
        opt_state=(),
        average=None,
        carry=carry,
        rng=jax.random.key(0),
        sums={},
        health=healthy(),
    )
    return Summary(
        state=state,
        step=step,
        loss=jnp.full((), jnp.nan),
        grads=None,
        n_completed_steps=0,
        elapsed_time=0.0,
        metrics={"train": {}},
    )


def _stored(
    path: str | os.PathLike[str], params: PyTree, variables: PyTree
) -> tuple[int, Any, Any]:
    opened = restoring.open_together(path)
    index = opened.index
    item = "average" if any(name[0] == "average" for name in index.leaves) else "model_params"
    targets = {item: params}
    if "model_state" in index.items:
        targets["model_state"] = variables
    found = restoring.restore_step(opened, targets).items
    return index.step, found[item], found.get("model_state", variables)


def find_step(model_dir: pathlib.Path, checkpoint_path: str | None) -> pathlib.Path:
    """The step to start, evaluate or predict with: the one given, or the directory's newest.

    Args:
        model_dir: The directory of the run.
        checkpoint_path: One step, the msgpack file of a T5X step, or a directory of steps.

    Raises:
        UsageError: If there is none.
        errors.NothingUsableError: If there are steps, and none can be used.
    """
    where = model_dir
    if checkpoint_path is not None:
        where = pathlib.Path(checkpoint_path).expanduser().absolute()
        if where.is_file() and where.name == names.T5X:
            where = where.parent
        if not where.is_dir():
            kind = "is no checkpoint" if where.exists() else "does not exist"
            raise UsageError(
                f"--checkpoint_path={checkpoint_path} {kind}. Give the directory of a step "
                "(checkpoint_<step>), or one that holds such directories."
            )
        if steps.is_step(where):
            return where
    return pathlib.Path(
        together.run_on_writer(
            hosts.current(), "search for the newest step", lambda: _newest(where)
        )
    )


def _newest(where: pathlib.Path) -> str:
    found = walkback.newest_usable(where, _checked)
    if found is None:
        raise UsageError(f"{where} has no checkpoint yet. Train first, or give --checkpoint_path.")
    return found.value


def _checked(path: str | os.PathLike[str]) -> str:
    steps.open_step(path)
    return str(path)
