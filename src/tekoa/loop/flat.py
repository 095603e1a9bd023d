"""States as lists of plain arrays, which is how they go from step to step.

Handing over a list costs less than a tree of records, and makes no Python code run
between the end of a step and the moment its result is stored.
"""

from collections.abc import Callable
from typing import Any

import jax

from tekoa.core.state import StepOutput, TrainState
from tekoa.core.step import Step
from tekoa.core.trees import PyTree

Leaves = list[jax.Array]
Outputs = list[Any]
FlatStep = Callable[[Leaves, Any], tuple[Leaves, Outputs]]


class Form:
    """Knows how to make a list of a state, and the state of a list."""

    def __init__(self, state: TrainState):
        leaves, self._treedef = jax.tree.flatten(state)
        self._params_def = jax.tree.structure(state.params)
        self._impls = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves]

    def leaves(self, state: TrainState) -> Leaves:
        """Gives the arrays of a state, those of keys too; they are shared with it."""
        return [
            x if impl is None else jax.random.key_data(x)
            for x, impl in zip(jax.tree.leaves(state), self._impls, strict=True)
        ]

    def state(self, leaves: Leaves) -> TrainState:
        """Gives the state of a list of arrays; they are shared with it."""
        wrapped = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(leaves, self._impls, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, wrapped)

    def output(self, outputs: Outputs) -> StepOutput:
        """Gives the output of a step of its list."""
        if len(outputs) == 1:
            return StepOutput(loss=outputs[0])
        loss, gradients_l2norm, weights_l2norm, *grads = outputs
        return StepOutput(
            loss=loss,
            gradients_l2norm=gradients_l2norm,
            weights_l2norm=weights_l2norm,
            grads=self._grads(grads),
        )

    def _grads(self, leaves: list[Any]) -> PyTree:
        return jax.tree.unflatten(self._params_def, leaves) if leaves else None

    def lean(self, step: Step) -> FlatStep:
        """Gives a step that takes and gives lists and tells its loss alone.

        Norms that nobody reads are then not computed.
        """

        def flat(leaves: Leaves, batch: Any) -> tuple[Leaves, Outputs]:
            state, output = step(self.state(leaves), batch)
            return self.leaves(state), [output.loss]

        flat.__name__ = getattr(step, "__name__", "step")
        return flat

    def step(self, step: Step) -> FlatStep:
        """Gives a step that takes and gives lists."""

        def flat(leaves: Leaves, batch: Any) -> tuple[Leaves, Outputs]:
            state, output = step(self.state(leaves), batch)
            numbers = [output.loss, output.gradients_l2norm, output.weights_l2norm]
            return self.leaves(state), [*numbers, *jax.tree.leaves(output.grads)]

        flat.__name__ = getattr(step, "__name__", "step")
        return flat


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
