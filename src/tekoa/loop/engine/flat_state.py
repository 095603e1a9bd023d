"""States as lists of plain arrays, which is how they are passed from step to step.

Passing a list is cheaper than passing a tree of records, and no Python code runs between the end
of a step and the moment its result is stored.
"""

from collections.abc import Callable
from typing import Any, cast

import jax

from tekoa.core import trees
from tekoa.core.state import StepOutput, TrainState
from tekoa.core.step import Step
from tekoa.core.trees import PyTree

Leaves = list[jax.Array]
Outputs = list[Any]
FlatStep = Callable[[Leaves, Any], tuple[Leaves, Outputs]]


class StateCodec:
    """Converts between a state and a list of its arrays."""

    def __init__(self, state: TrainState):
        leaves, self._treedef = jax.tree.flatten(state)
        self._params_def = jax.tree.structure(state.params)
        self._impls = [jax.random.key_impl(x) if trees.is_key(x) else None for x in leaves]
        # Where each array is in the list.
        self._places: TrainState = jax.tree.unflatten(self._treedef, range(len(leaves)))

    def flatten(self, state: TrainState) -> Leaves:
        """Returns the arrays of a state, PRNG keys as their data; nothing is copied."""
        return [
            x if impl is None else jax.random.key_data(x)
            for x, impl in zip(jax.tree.leaves(state), self._impls, strict=True)
        ]

    def unflatten(self, leaves: Leaves) -> TrainState:
        """Returns the state that consists of these arrays; nothing is copied."""
        leaves = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(leaves, self._impls, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def n_bad(self, leaves: Leaves) -> jax.Array:
        """Returns the number of steps that met NaN or Inf."""
        return leaves[cast("int", self._places.health.n_bad)]

    def with_sums(self, leaves: Leaves, sums: PyTree) -> Leaves:
        """Returns the arrays with other metrics."""
        leaves = list(leaves)
        for i, x in zip(jax.tree.leaves(self._places.sums), jax.tree.leaves(sums), strict=True):
            leaves[i] = x
        return leaves

    def unflatten_output(self, outputs: Outputs) -> StepOutput:
        """Returns the output of a step from its list."""
        if len(outputs) == 1:
            return StepOutput(loss=outputs[0])
        loss, gradients_l2norm, weights_l2norm, *grads = outputs
        return StepOutput(
            loss=loss,
            gradients_l2norm=gradients_l2norm,
            weights_l2norm=weights_l2norm,
            grads=jax.tree.unflatten(self._params_def, grads) if grads else None,
        )

    def flat_step(self, step: Step, *, loss_only: bool = False) -> FlatStep:
        """Creates a step over lists of arrays.

        Args:
            step: The step over states.
            loss_only: Whether the loss is the only output, so that XLA drops the norms.
        """

        def flat(leaves: Leaves, batch: Any) -> tuple[Leaves, Outputs]:
            state, output = step(self.unflatten(leaves), batch)
            if loss_only:
                return self.flatten(state), [output.loss]
            norms = [output.gradients_l2norm, output.weights_l2norm]
            return self.flatten(state), [output.loss, *norms, *jax.tree.leaves(output.grads)]

        flat.__name__ = getattr(step, "__name__", "step")
        return flat
