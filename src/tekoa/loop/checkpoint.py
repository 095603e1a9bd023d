"""The record that a loop passes to extensions."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, TypeVar

from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.loop.media import Media

Metrics = Mapping[str, Mapping[str, float]]
T = TypeVar("T", bound=type)

# Properties that are parts of the state, and the state's own names of them.
PARTS = {
    "model_params": "params",
    "model_state": "variables",
    "optimizer_state": "opt_state",
    "average": "average",
    "carry": "carry",
    "rng": "rng",
}


def _buildable_from_parts(cls: T) -> T:
    """Lets a checkpoint be created from the parts of its state instead of the state."""
    target: Any = cls
    init_fields = target.__init__

    @functools.wraps(init_fields)
    def init(self: Any, **fields: Any) -> None:
        parts = {PARTS[name]: fields.pop(name) for name in PARTS if name in fields}
        if parts and "state" in fields:
            raise TypeError(f"{cls.__name__} got state and parts of it. Pass one of the two.")
        if parts:
            fields["state"] = TrainState.of_parts(step=fields.setdefault("step", 0), **parts)
        init_fields(self, **fields)

    target.__init__ = init
    return cls


@_buildable_from_parts
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint:
    """A snapshot of training; it stays valid while the loop continues.

    It can also be created from its parts: `Checkpoint(model_params=..., step=..., ...)`.

    Attributes:
        state: The complete state of training.
        step: Completed optimizer steps.
        loss: The loss of the last step.
        grads: The gradients of the last step; None unless `TrainLoop(grads=True)`, and None if the
            loop stopped between two regular checkpoints.
        n_completed_steps: Steps since the previous checkpoint.
        elapsed_time: Seconds since the previous checkpoint.
        compile_time: How many of them the compilation of steps took.
        data_time: Seconds of these that the loop spent on reading batches.
        data_state: Data position, or None if it is unknown.
        facts: Choices that a resumed run must repeat, such as steps per dispatch.
        setup: Facts from the start of the loop: seconds to load and to initialise, number of
            weights, bytes, rows and tokens of a batch, and the shapes of the model's inputs.
        resumed_from: The digest of the commit that the loop resumed from; empty if there is none.
        model_params: The model's parameters; this and the following are parts of `state`.
        model_state: The model's other variable collections.
        optimizer_state: The optimizer's state.
        average: Moving average of the parameters, or None.
        carry: The state that a recurrent model passes to the next batch, or None.
        rng: The root key of all steps.

    >>> checkpoint = Checkpoint(model_params={'w': 0.5}, step=10, loss=0.25)
    >>> checkpoint, checkpoint.model_params
    (<Checkpoint step 10, loss 0.25>, {'w': 0.5})
    """

    state: TrainState
    step: int
    loss: Any = math.nan
    grads: PyTree = None
    n_completed_steps: int = 0
    elapsed_time: float = 0.0
    compile_time: float = 0.0
    data_time: float = 0.0
    data_state: Any = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    setup: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resumed_from: str = ""

    model_params = property(attrgetter("state.params"))
    model_state = property(attrgetter("state.variables"))
    optimizer_state = property(attrgetter("state.opt_state"))
    average = property(attrgetter("state.average"))
    carry = property(attrgetter("state.carry"))
    rng = property(attrgetter("state.rng"))

    def __repr__(self) -> str:
        """Returns the step and the loss; the arrays would fill pages."""
        return f"<{type(self).__name__} step {self.step}, loss {float(self.loss):.4g}>"


@_buildable_from_parts
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Summary(Checkpoint):
    """A checkpoint with metrics, by group ("train", "eval") and name.

    Attributes:
        metrics: The metrics.
        media: Text, histograms and images for logs, by name.
    """

    metrics: Metrics = dataclasses.field(default_factory=dict)
    media: Mapping[str, Media] = dataclasses.field(default_factory=dict)

    @property
    def scalars(self) -> dict[str, float]:
        """All metrics in one dict, by names such as "train/loss"."""
        return {
            f"{group}/{name}": float(value)
            for group, values in self.metrics.items()
            for name, value in values.items()
        }

    def with_metrics(self, group: str, values: Mapping[str, float]) -> "Summary":
        """Returns a copy with one more group of metrics."""
        return dataclasses.replace(self, metrics={**self.metrics, group: dict(values)})

    def with_media(self, name: str, media: Media) -> "Summary":
        """Returns a copy with one more text, histogram or image for logs."""
        return dataclasses.replace(self, media={**self.media, name: media})


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
