"""The record that a loop hands to extensions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree

Metrics = Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A moment of training; it stays valid however far the loop goes on.

    Attributes:
        state: All that the step remembers.
        step: Completed optimizer steps.
        loss: The loss of the last step.
        grads: The gradients of the last step, or None where the loop was told not to keep
            them or stopped between two checkpoints.
        n_completed_steps: Steps since the previous checkpoint.
        elapsed_time: Seconds since the previous checkpoint.
        data_state: Position in the data, or None where it cannot be told.
        facts: Choices that a resumed run must repeat, such as steps per dispatch.
        setup: What the loop told of itself at its start: seconds to load and to
            initialise, number of weights, bytes.
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

    @property
    def model_params(self) -> PyTree:
        """What is learned."""
        return self.state.params

    @property
    def model_state(self) -> PyTree:
        """The model's other variable collections."""
        return self.state.variables

    @property
    def optimizer_state(self) -> PyTree:
        """The optimizer's state."""
        return self.state.opt_state

    @property
    def average(self) -> PyTree:
        """Moving average of the parameters, or None."""
        return self.state.average

    @property
    def carry(self) -> PyTree:
        """What a recurrent model hands on to the next batch, or None."""
        return self.state.carry

    @property
    def rng(self) -> jax.Array:
        """The root key of all steps."""
        return self.state.rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary(Checkpoint):
    """A checkpoint with metrics, by group ("train", "eval") and name."""

    metrics: Metrics = dataclasses.field(default_factory=dict)

    def with_metrics(self, group: str, values: Mapping[str, float]) -> "Summary":
        """Gives a summary with one more group of metrics."""
        return dataclasses.replace(self, metrics={**self.metrics, group: dict(values)})


def as_summary(checkpoint: Checkpoint) -> Summary:
    """Gives the checkpoint as a summary, without metrics if it had none."""
    if isinstance(checkpoint, Summary):
        return checkpoint
    names = [field.name for field in dataclasses.fields(Checkpoint)]
    return Summary(**{name: getattr(checkpoint, name) for name in names})
