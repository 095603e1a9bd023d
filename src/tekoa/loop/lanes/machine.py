"""How one program runs the steps of several lanes.

- "map" runs the lanes one after the other inside one program, in a loop. Each lane computes what
  it would compute alone, on CPU to the bit, and lanes that have ended cost nothing.
- "vmap" runs them side by side. That uses an accelerator best, but matrix products have another
  shape, so the last bits differ from those of a lane alone.
- "turn" calls one program for each lane: convolutions on CPU are slow inside a loop.
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

How = Literal["auto", "map", "vmap", "turn"]


def choose_how(how: How, program: constants.Traced) -> How:
    """Returns how lanes run on this machine, if nothing is requested."""
    if how != "auto":
        return how
    if jax.default_backend() != "cpu":
        return "vmap"
    # The text of a program includes the functions that it calls.
    return "turn" if "conv_general_dilated" in str(program.program) else "map"


class Machine:
    """Runs one kind of step for all lanes of a group.

    Args:
        programs: The traced step of each lane; all are alike.
        how: How lanes run; not "auto".
    """

    def __init__(self, programs: Sequence[constants.Traced], how: How):
        step, values = constants.merge(programs)
        self._n_lanes, self._how = len(programs), how
        if how == "turn":
            self._values: Any = values
            self._program = jax.jit(step, donate_argnums=1)
        else:
            self._values = [jnp.stack(column) for column in zip(*values, strict=True)]
            run = {"map": _mapped, "vmap": _vmapped}[how](step)
            self._program = jax.jit(run, donate_argnums=1)

    def run(
        self,
        states: Any,
        batches: Sequence[Any],
        *,
        streams: np.ndarray,
        is_active: np.ndarray,
    ) -> tuple[Any, Any]:
        """Runs one step.

        Args:
            states: The states as `load` returns them; they are consumed.
            batches: One batch per stream.
            streams: The stream of each lane.
            is_active: Which lanes to run; what is returned for the others has no meaning.
        """
        if self._how != "turn":
            stacked = stack_batches(list(batches))
            return self._program(self._values, states, stacked, streams, is_active)
        results: list[Any] = [(None, None)] * len(states)
        for i in np.flatnonzero(is_active):
            results[i] = self._program(self._values[i], states[i], batches[streams[i]])
        return [leaves for leaves, _ in results], [outputs for _, outputs in results]


def load(lanes: Sequence[Leaves], how: How) -> Any:
    """Returns the states of all lanes in the form in which a machine runs them."""
    return [_copy(leaves) for leaves in lanes] if how == "turn" else _stack(list(lanes))


def unload(lanes: Any, n_lanes: int, how: How) -> list[Any]:
    """Returns the states, or the outputs, of each lane."""
    return lanes if how == "turn" else _unstack(lanes, n_lanes)


def _mapped(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(values: Any, states: Leaves, batches: Any, streams: Any, is_active: Any) -> Any:
        def one(lane: Any) -> tuple[Leaves, Outputs]:
            own_values, leaves, stream, active = lane
            batch = jax.tree.map(lambda x: x[stream], batches)
            shapes = jax.eval_shape(step, own_values, leaves, batch)[1]
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return jax.lax.cond(
                active, lambda: step(own_values, leaves, batch), lambda: (leaves, zeros)
            )

        return jax.lax.map(one, (values, states, streams, is_active))

    return run


def _vmapped(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(values: Any, states: Leaves, batches: Any, streams: Any, is_active: Any) -> Any:
        del is_active

        def one(own_values: Any, leaves: Leaves, stream: Any) -> tuple[Leaves, Outputs]:
            return step(own_values, leaves, jax.tree.map(lambda x: x[stream], batches))

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
