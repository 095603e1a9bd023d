"""The record that a loop passes to extensions."""

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import jax

from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree

Metrics = Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A snapshot of training; it stays valid while the loop continues.

    Attributes:
        state: The complete state of training.
        step: Completed optimizer steps.
        loss: The loss of the last step.
        grads: The gradients of the last step; None unless `TrainLoop(grads=True)`, and None if the
            loop stopped between two regular checkpoints.
        n_completed_steps: Steps since the previous checkpoint.
        elapsed_time: Seconds since the previous checkpoint.
        data_state: Data position, or None if it is unknown.
        facts: Choices that a resumed run must repeat, such as steps per dispatch.
        setup: Facts from the start of the loop: seconds to load and to initialise, number of
            weights, bytes.
        resumed_from: The digest of the commit that the loop resumed from; empty if there is none.
        model_params: The model's parameters; this and the following are parts of `state`.
        model_state: The model's other variable collections.
        optimizer_state: The optimizer's state.
        average: Moving average of the parameters, or None.
        carry: The state that a recurrent model passes to the next batch, or None.
        rng: The root key of all steps.
    """

    state: TrainState
    step: int
    loss: jax.Array
    grads: PyTree
    n_completed_steps: int
    elapsed_time: float
    data_state: Any = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    setup: Mapping[str, float] = dataclasses.field(default_factory=dict)
    resumed_from: str = ""

    model_params = property(attrgetter("state.params"))
    model_state = property(attrgetter("state.variables"))
    optimizer_state = property(attrgetter("state.opt_state"))
    average = property(attrgetter("state.average"))
    carry = property(attrgetter("state.carry"))
    rng = property(attrgetter("state.rng"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary(Checkpoint):
    """A checkpoint with metrics, by group ("train", "eval") and name."""

    metrics: Metrics = dataclasses.field(default_factory=dict)

    def with_metrics(self, group: str, values: Mapping[str, float]) -> "Summary":
        """Returns a copy with one more group of metrics."""
        return dataclasses.replace(self, metrics={**self.metrics, group: dict(values)})


def as_summary(checkpoint: Checkpoint) -> Summary:
    """Returns the checkpoint as a summary, with empty metrics if it had none."""
    if isinstance(checkpoint, Summary):
        return checkpoint
    names = [field.name for field in dataclasses.fields(Checkpoint)]
    return Summary(**{name: getattr(checkpoint, name) for name in names})


def find_metric(checkpoint: Checkpoint, group: str, name: str) -> float:
    """Returns one metric of a checkpoint.

    Raises:
        LookupError: If the checkpoint has no such metric.
    """
    metrics = as_summary(checkpoint).metrics
    if name in metrics.get(group, {}):
        return float(metrics[group][name])
    available = [f"{group}/{name}" for group, values in metrics.items() for name in values]
    raise LookupError(
        f"The checkpoint at step {checkpoint.step} has no metric '{group}/{name}'; it has "
        f"{available}. An EvalLoop must come before the stage that needs its metrics."
    )
