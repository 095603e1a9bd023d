"""The records of the training step: its state and its output."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tekoa.core import metrics
from tekoa.core.trees import PyTree


class Health(NamedTuple):
    """A record of NaN and Inf in training steps."""

    n_bad: jax.Array  # Number of bad steps: with NaN or Inf in loss, gradients or update.
    first_step: jax.Array  # The first bad step, counted from 1; 0 if there is none.
    first_loss: jax.Array  # Its loss.
    first_leaf: jax.Array  # Its first bad leaf: gradients first, then parameters; -1 if none.

    @classmethod
    def zero(cls) -> "Health":
        """Creates an empty record from distinct arrays, so that all can be donated."""
        n_bad, first_step = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return cls(n_bad, first_step, jnp.zeros((), jnp.float32), jnp.full((), -1, jnp.int32))


class LossScale(NamedTuple):
    """The scale of the loss in training in float16; see `core.loss.scale`."""

    scale: jax.Array  # Factor of the loss.
    n_good: jax.Array  # Steps since the scale last changed.
    n_overflows: jax.Array  # Steps that skipped their update because the scale was too large.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step reads and writes, and all that a resumed run restores.

    Attributes:
        step: Completed optimizer steps, int32. Steps skipped by `on_nan="skip"` count,
            and so do those that only lower the loss scale.
        params: The trainable parameters.
        variables: The model's other collections, without the carry.
        opt_state: The optimizer's state.
        average: Moving average of the parameters, or None.
        carry: The state of a recurrent model between batches, or None.
        rng: The root key; step k uses it folded with k.
        sums: Metrics summed since they were last read.
        health: The record of NaN and Inf.
        loss_scale: The scale of the loss with `precision="fp16"`, else None.
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
    loss_scale: LossScale | None = None

    @classmethod
    def of_parts(
        cls,
        params: PyTree,
        *,
        step: int = 0,
        variables: PyTree = None,
        opt_state: PyTree = (),
        average: PyTree = None,
        carry: PyTree = None,
        rng: jax.Array | None = None,
    ) -> "TrainState":
        """Creates a state from its main parts; the others are as before the first step."""
        return cls(
            step=jnp.asarray(step, jnp.int32),
            params=params,
            variables={} if variables is None else variables,
            opt_state=opt_state,
            average=average,
            carry=carry,
            rng=jax.random.key(0) if rng is None else rng,
            sums={},
            health=Health.zero(),
        )

    @property
    def eval_params(self) -> PyTree:
        """The parameters for evaluation and prediction: the average if there is one."""
        return self.params if self.average is None else self.average

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a copy with some fields replaced."""
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The output of one training step.

    Attributes:
        loss: The loss of this step's batch, before the update.
        gradients_l2norm: Norm of the gradients before clipping, or None if not computed.
        weights_l2norm: Norm of the updated parameters, or None if not computed.
        grads: The gradients themselves if requested, else None.
    """

    loss: jax.Array
    gradients_l2norm: jax.Array | None = None
    weights_l2norm: jax.Array | None = None
    grads: PyTree = None
