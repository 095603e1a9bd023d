"""The records of the step: all that training remembers, and what one step tells."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tekoa.core import metrics
from tekoa.core.trees import PyTree


class Health(NamedTuple):
    """What the step saw of numbers that are not finite."""

    n_bad: jax.Array  # Steps whose loss or gradients were not finite.
    first_step: jax.Array  # The first of them, as the count it would have completed; 0: none.
    first_loss: jax.Array  # Its loss.
    first_leaf: jax.Array  # Its first bad leaf, of gradients then of parameters; -1: none.


def healthy() -> Health:
    """The record before anything went wrong; its arrays are distinct, so they can be donated."""
    n_bad, first_step = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return Health(n_bad, first_step, jnp.zeros((), jnp.float32), jnp.full((), -1, jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step reads and writes; what resumes is exactly this.

    Attributes:
        step: Completed optimizer steps, int32. Steps skipped by `on_nan="skip"` count.
        params: What is learned.
        variables: The model's other collections, without the carry.
        opt_state: The optimizer's state.
        average: Moving average of the parameters, or None.
        carry: What a recurrent model hands from batch to batch, or None.
        rng: The root key; step k uses it folded with k.
        sums: Metrics gathered since they were last read.
        health: The record of numbers that were not finite.
    """

    step: jax.Array
    params: PyTree
    variables: PyTree
    opt_state: PyTree
    average: PyTree
    carry: PyTree
    rng: jax.Array
    sums: dict[str, metrics.Mean]
    health: Health

    @property
    def eval_params(self) -> PyTree:
        """What evaluation, best checkpoints and prediction use: the average if there is one."""
        return self.params if self.average is None else self.average

    def replace(self, **changes: Any) -> "TrainState":
        """Gives a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step tells of itself.

    Attributes:
        loss: The loss of this step's batch, before the update.
        gradients_l2norm: Norm of the gradients that the optimizer was given; None where it is
            not told.
        weights_l2norm: Norm of the parameters that the step made; None where it is not told.
        grads: The gradients themselves, where asked for, else None.
    """

    loss: jax.Array
    gradients_l2norm: jax.Array | None = None
    weights_l2norm: jax.Array | None = None
    grads: PyTree = None
