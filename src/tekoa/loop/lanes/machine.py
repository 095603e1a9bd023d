"""How one program runs the steps of several lanes.

- "turn" calls the program once for each lane. Each lane computes what it would compute alone, to
  the bit, and lanes that have ended cost nothing. (In a loop over the lanes inside the program, XLA
  fuses the operations of a step with those of the loop, and the last bits differ.)
- "vmap" runs the lanes side by side. That uses an accelerator best, but matrix products have
  another shape, so the last bits differ from those of a lane alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tekoa.loop.engine.dispatch import stack_batches
from tekoa.loop.engine.flat_state import Leaves, Outputs
from tekoa.loop.lanes import constants

How = Literal["auto", "turn", "vmap"]


def choose_how(how: How) -> How:
    """Returns how lanes run on this machine, if nothing is requested."""
    if how != "auto":
        return how
    return "turn" if jax.default_backend() == "cpu" else "vmap"


class Machine:
    """Runs the steps of all lanes of a group.

    Args:
        steps: The traced step of each lane; all are alike. Its only output is the loss.
        last_steps: The last step before a checkpoint of each lane, which has more outputs.
        how: How lanes run; not "auto". With "vmap" all steps are last steps.
    """

    def __init__(
        self,
        steps: Sequence[constants.Traced],
        last_steps: Sequence[constants.Traced],
        how: How,
    ):
        self._how = how
        last, last_values = constants.merge(last_steps)
        if how == "vmap":
            self._values: Any = [jnp.stack(column) for column in zip(*last_values, strict=True)]
            self._program = jax.jit(_vmapped(last), donate_argnums=1)
            return
        step, values = constants.merge(steps)
        self._values = list(zip(values, last_values, strict=True))
        # Convolutions on CPU are slow inside a branch, so they get a program for each kind of step.
        static = (3,) if _has_convolution(last_steps[0]) else ()
        self._program = jax.jit(_branched(step, last), donate_argnums=1, static_argnums=static)

    def run(
        self,
        states: Any,
        batches: Sequence[Any],
        *,
        streams: np.ndarray,
        is_active: np.ndarray,
        is_last: bool,
    ) -> tuple[Any, Any]:
        """Runs one step.

        Args:
            states: The states as `load` returns them; they are consumed.
            batches: One batch per stream.
            streams: The stream of each lane.
            is_active: Which lanes to run; what is returned for the others has no meaning.
            is_last: Whether it is the last step before a checkpoint.
        """
        if self._how == "vmap":
            return self._program(self._values, states, stack_batches(list(batches)), streams)
        leaves: list[Any] = [None] * len(states)
        outputs: list[Any] = [None] * len(states)
        for i in np.flatnonzero(is_active):
            batch = batches[streams[i]]
            leaves[i], outputs[i] = self._program(self._values[i], states[i], batch, is_last)
            if not is_last:
                del outputs[i][1:]
        return leaves, outputs


def load(lanes: Sequence[Leaves], how: How) -> Any:
    """Returns the states of all lanes in the form in which a machine runs them."""
    return [_copy(leaves) for leaves in lanes] if how == "turn" else _stack(list(lanes))


def unload(lanes: Any, n_lanes: int, how: How) -> list[Any]:
    """Returns the states, or the outputs, of each lane."""
    return lanes if how == "turn" else _unstack(lanes, n_lanes)


def _has_convolution(traced: constants.Traced) -> bool:
    # The text of a program includes the functions that it calls.
    return "conv_general_dilated" in str(traced.program)


def _branched(step: Callable[..., Any], last: Callable[..., Any]) -> Callable[..., Any]:
    """Returns one function for both kinds of steps."""

    def run(values: Any, leaves: Leaves, batch: Any, is_last: Any) -> tuple[Leaves, Outputs]:
        def run_step() -> tuple[Leaves, Outputs]:
            return step(values[0], leaves, batch)

        def run_last() -> tuple[Leaves, Outputs]:
            return last(values[1], leaves, batch)

        if isinstance(is_last, bool):
            return run_last() if is_last else run_step()
        shapes = jax.eval_shape(run_last)[1]

        def run_padded() -> tuple[Leaves, Outputs]:
            new_leaves, outputs = run_step()
            return new_leaves, [*outputs, *(jnp.zeros(x.shape, x.dtype) for x in shapes[1:])]

        return jax.lax.cond(is_last, run_last, run_padded)

    return run


def _vmapped(last: Callable[..., Any]) -> Callable[..., Any]:
    def run(values: Any, states: Leaves, batches: Any, streams: Any) -> tuple[Leaves, Outputs]:
        def one(own_values: Any, leaves: Leaves, stream: Any) -> tuple[Leaves, Outputs]:
            return last(own_values, leaves, jax.tree.map(lambda x: x[stream], batches))

        return jax.vmap(one)(values, states, streams)

    return run


@jax.jit
def _copy(leaves: Leaves) -> Leaves:
    return [jnp.copy(x) for x in leaves]


@jax.jit
def _stack(lanes: list[Leaves]) -> Leaves:
    return [jnp.stack(column) for column in zip(*lanes, strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def _unstack(lanes: Leaves, n: int) -> list[Leaves]:
    return [[x[i] for x in lanes] for i in range(n)]
