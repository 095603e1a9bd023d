"""The weights to export, and what is known about them."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from tekoa.core import objective, trees
from tekoa.core.model import UNTRAINED, ModelFns, Variables, merge_untrained
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.exchange.names import PARAMS, VARIABLES, Weights, random_streams
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
        carry: What the model passes from batch to batch; None if nothing.
        inputs: The shapes of the model's inputs, as `shapes_to_json` describes them; None if they
            are unknown.
        step: Completed optimizer steps.
        metrics: The metrics of the checkpoint.
        commit: The digest that identifies the checkpoint; empty if it is not on disk.
    """

    params: PyTree
    variables: Mapping[str, PyTree]
    carry: PyTree = None
    inputs: Any = None
    step: int = 0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    commit: str = ""

    @property
    def weights(self) -> dict[str, PyTree]:
        """The arrays by item, as a checkpoint stores them."""
        return {PARAMS: self.params, VARIABLES: dict(self.variables)}


class HasState(Protocol):
    """A loop, or the result of `fit`."""

    @property
    def state(self) -> TrainState:
        """The complete state of training."""
        ...


def for_model(
    weights: Trained, fns: ModelFns, inputs: tuple[Any, ...], *, what: str, cast: bool = False
) -> Trained:
    """Returns weights in the structure of a model: with its lists, tuples and keys.

    Args:
        weights: The weights, by name.
        fns: The model.
        inputs: Sample inputs, or their shapes; empty if the model is initialised already.
        what: Where the weights are stored, for the message.
        cast: Whether to convert them to the dtypes of the model.

    Raises:
        errors.MismatchError: If the weights do not fit the model; lists all differences.
    """
    params, variables = merge_untrained(*jax.eval_shape(fns.init, jax.random.key(0), inputs))
    variables, _ = objective.split_carry(variables)
    target = {PARAMS: params, VARIABLES: variables}
    loaded = like(target, weights.weights, what, cast=cast)
    return dataclasses.replace(weights, params=loaded[PARAMS], variables=loaded[VARIABLES])


def like(target: Weights, stored: Weights, what: str, *, cast: bool = False) -> dict[str, PyTree]:
    """Returns stored arrays in the structure of a model's own.

    Random streams that are not stored keep their values.

    Args:
        target: The model's arrays or shapes, by item.
        stored: The stored arrays, by item.
        what: Where they are stored, for the message.
        cast: Whether to convert them to the dtypes of the model.

    Raises:
        errors.MismatchError: If they do not fit the model; lists all differences.
    """
    loaded, report = warm_start.warm_start(dict(target), dict(stored), strict=False, cast=cast)
    leaves = trees.flatten_named(dict(target))
    streams = {"/".join(name) for name in random_streams(target)}
    streams = {name for name in streams if not isinstance(leaves[name], jax.ShapeDtypeStruct)}
    rows = [
        row
        for row in report.rows
        if row.outcome != "loaded" and not (row.outcome == "missing" and row.name in streams)
    ]
    if rows:
        raise errors.MismatchError(
            f"{what} does not fit the model:\n{Report(rows)}", [row.name for row in rows]
        )
    return loaded


def read(
    source: str | os.PathLike[str] | TrainState | HasState,
    *,
    step: int | None = None,
    average: bool = True,
) -> Trained:
    """Returns the weights of a checkpoint or of a state.

    Args:
        source: The directory of a run, of its checkpoints, or of a single one; or a state, or a
            loop or result that has one.
        step: The step to read; by default the newest valid one.
        average: Whether to use the moving average of the parameters if there is one.

    Raises:
        TypeError: If the source is something else, such as bare parameters.
        errors.StoreError: If there is no such checkpoint.
    """
    source = getattr(source, "state", source)
    if isinstance(source, TrainState):
        params = source.eval_params if average else source.params
        params, variables = merge_untrained(params, source.variables)
        return Trained(
            params=params,
            variables=variables,
            carry=source.carry,
            step=int(source.step),
        )
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "Expected the directory of a run, a state, or the result of `fit`, got "
            f"{type(source).__name__}. Of bare parameters: tekoa.TrainState.of_parts(params)."
        )
    opened = load.open_newest(pathlib.Path(source), step=step)
    stored: dict[str, Any] = load.load_step(opened, items=_ITEMS)
    params = stored["average"] if average and stored.get("average") else stored["model_params"]
    variables, carry = objective.split_carry(stored.get("model_state") or {})
    return Trained(
        params=_all_params(params, variables),
        variables={name: tree for name, tree in variables.items() if name != UNTRAINED},
        carry=stored.get("carry") or carry,
        inputs=opened.index.meta.get("inputs"),
        step=opened.index.step,
        metrics=opened.index.metrics,
        commit=opened.commit.digest,
    )


def _all_params(params: PyTree, variables: Variables) -> PyTree:
    """Returns stored parameters with those that were not trained; a store has no empty leaves."""
    untrained = trees.named_leaves(variables.get(UNTRAINED, {}))
    return trees.nest({**untrained, **trees.named_leaves(params)})
