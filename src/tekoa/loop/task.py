"""What a loop is given: the task, and the things that may stand beside it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import optax

from tekoa.core import batch as batches
from tekoa.core import objective
from tekoa.core.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What to learn from what.

    Attributes:
        optimizer: Any optax transformation.
        data: An iterable of `(inputs, targets)` pairs or of dicts.
        loss: `loss(*outputs, *targets)`, as `make_train_step` takes it; None where the
            model gives the loss itself.
        apply: The function that runs the model, where `init` does not know it.
        split: Tells the inputs of a batch from its targets.
    """

    optimizer: optax.GradientTransformation
    data: Iterable[Any]
    loss: Callable[..., Any] | None = None
    apply: Callable[..., Any] | None = None
    split: objective.Split = batches.split_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a reader found, and what belongs to it.

    Attributes:
        state: The state to go on from, or a function that makes it of a fresh one.
        data_state: Position in the data.
        facts: Choices of the run so far.
    """

    state: TrainState | Callable[[TrainState], TrainState]
    data_state: Any = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class StateReader(Protocol):
    """What may stand for `init`: it knows how to initialise, and what was saved."""

    @property
    def target(self) -> Any:
        """What initialises from scratch: all that `TrainLoop` takes as `init`."""
        ...

    def restore(self, fresh: TrainState) -> Restored | None:
        """Gives the saved state in the form of a fresh one, or None if there is none."""
        ...


class StopFlag(Protocol):
    """Something that may ask the loop to stop, such as a signal."""

    def is_set(self) -> bool: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTask:
    """What to measure on what.

    Attributes:
        metrics: Name to `fn(*outputs, *targets)`, which gives a mean over the batch, one
            number per row, or a `Mean(total, count)`.
        data: An iterable of `(inputs, targets)` pairs or of dicts.
        apply: The function that runs the model, where the loop's `init` does not know it.
        split: Tells the inputs of a batch from its targets.
    """

    metrics: Mapping[str, Callable[..., Any]]
    data: Iterable[Any]
    apply: Callable[..., Any] | None = None
    split: objective.Split = batches.split_batch


def check_count(name: str, value: Any, least: int) -> int:
    """Gives a whole number that a user set.

    Raises:
        TypeError: If it is not one.
        ValueError: If it is below `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}.")
    return int(value)
