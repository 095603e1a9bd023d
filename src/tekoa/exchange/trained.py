"""The weights to export, and what is known about them."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from tekoa.core import objective
from tekoa.core.model import ModelFns, merge_untrained
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.exchange.names import PARAMS, VARIABLES, Weights
from tekoa.store import errors
from tekoa.store.read import load
from tekoa.store.transfer import warm_start
from tekoa.store.transfer.report import Report

_ITEMS = ("model_params", "model_state", "average", "carry")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """Trained weights.

    Attributes:
        params: All parameters, trained or not; their moving average if there is one.
        variables: The other collections of the model, without the carry.
        has_carry: Whether the model passes a carry from batch to batch.
        step: Completed optimizer steps.
        metrics: The metrics of the checkpoint.
        commit: The digest that identifies the checkpoint; empty if it is not on disk.
    """

    params: PyTree
    variables: Mapping[str, PyTree]
    has_carry: bool = False
    step: int = 0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    commit: str = ""

    @property
    def weights(self) -> dict[str, PyTree]:
        """The arrays by item, as a checkpoint stores them."""
        return {PARAMS: self.params, VARIABLES: dict(self.variables)}


def for_model(weights: Trained, fns: ModelFns, inputs: tuple[Any, ...]) -> Trained:
    """Returns weights in the structure of a model: with its lists, tuples and keys.

    Args:
        weights: The weights, by name.
        fns: The model.
        inputs: Sample inputs; empty if the model is initialised already.

    Raises:
        errors.MismatchError: If the weights do not fit the model; lists all differences.
    """
    params, variables = merge_untrained(*jax.eval_shape(fns.init, jax.random.key(0), inputs))
    variables, carry = objective.split_carry(variables)
    loaded = like({PARAMS: params, VARIABLES: variables}, weights.weights, "The checkpoint")
    return dataclasses.replace(
        weights,
        params=loaded[PARAMS],
        variables=loaded[VARIABLES],
        has_carry=carry is not None,
    )


def like(target: Weights, stored: Weights, what: str) -> dict[str, PyTree]:
    """Returns stored arrays in the structure of a model's own.

    Args:
        target: The model's arrays or shapes, by item.
        stored: The stored arrays, by item.
        what: Where they are stored, for the message.

    Raises:
        errors.MismatchError: If they do not fit the model; lists all differences.
    """
    loaded, report = warm_start.warm_start(dict(target), dict(stored), strict=False)
    rows = [row for row in report.rows if row.outcome != "loaded"]
    if rows:
        raise errors.MismatchError(
            f"{what} does not fit the model:\n{Report(rows)}", [row.name for row in rows]
        )
    return loaded


def read(
    source: str | os.PathLike[str] | TrainState, *, step: int | None = None, average: bool = True
) -> Trained:
    """Returns the weights of a checkpoint or of a state.

    Args:
        source: The directory of a run, of its checkpoints, or of a single one; or a state.
        step: The step to read; by default the newest valid one.
        average: Whether to use the moving average of the parameters if there is one.

    Raises:
        errors.StoreError: If there is no such checkpoint.
    """
    if isinstance(source, TrainState):
        params = source.eval_params if average else source.params
        params, variables = merge_untrained(params, source.variables)
        return Trained(
            params=params,
            variables=variables,
            has_carry=source.carry is not None,
            step=int(source.step),
        )
    opened = load.open_newest(pathlib.Path(source), step=step)
    stored: dict[str, Any] = load.load_step(opened, items=_ITEMS)
    params = stored["average"] if average and stored.get("average") else stored["model_params"]
    variables, carry = objective.split_carry(stored.get("model_state") or {})
    params, variables = merge_untrained(params, variables)
    return Trained(
        params=params,
        variables=variables,
        has_carry=bool(stored.get("carry")) or carry is not None,
        step=opened.index.step,
        metrics=opened.index.metrics,
        commit=opened.commit.digest,
    )
