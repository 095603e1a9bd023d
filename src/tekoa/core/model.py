"""What the engine needs to know of a model: two pure functions.

A bridge makes `ModelFns` from a Linen, NNX, Equinox or Haiku model or from plain
functions; everything above the bridges speaks only of this record.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tekoa.core.trees import PyTree

Variables = Mapping[str, PyTree]


class InitFn(Protocol):
    """Makes parameters and the other variables from a key and sample inputs."""

    def __call__(self, rng: Any, inputs: tuple[Any, ...], /) -> tuple[PyTree, Variables]: ...


class ApplyFn(Protocol):
    """Runs the model on one batch of inputs.

    Returns the outputs and the variables that changed or may have changed; what it does
    not return stays as it was.
    """

    def __call__(
        self,
        params: PyTree,
        variables: Variables,
        inputs: tuple[Any, ...],
        /,
        *,
        rng: Any,
        train: bool,
    ) -> tuple[Any, Variables]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFns:
    """A model as pure functions.

    Attributes:
        init: `(rng, inputs) -> (params, variables)`. Variables is a mapping of
            collections; the collection named 'carry' is kept from batch to batch.
        apply: `(params, variables, inputs, rng=, train=) -> (outputs, variables)`.
        merge: `(params, variables) -> the user's own model object`, where there is one.
    """

    init: InitFn
    apply: ApplyFn
    merge: Callable[[PyTree, Variables], Any] | None = None
