"""Checks that a resumed run is bit-for-bit the same as an uninterrupted one."""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tekoa.core import trees
from tekoa.core.state import TrainState
from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.task import Restored
from tekoa.loop.train import TrainLoop
from tekoa.testing import compare, kills


def check_resume(
    make_loop: Callable[[Callable[[Any], Any]], TrainLoop] | str,
    *,
    n_steps: int | None = None,
    at: int | None = None,
    n_kills: int | None = None,
) -> None:
    """Raises unless a resumed run computes the same bits as an uninterrupted one.

    Trains to the end, then again from a checkpoint in the middle, and compares the losses, the
    last state and the data position. Then repeats this with real processes, checkpoints on disk,
    and SIGKILL and SIGTERM at random moments, and compares every leaf of the state at every
    checkpoint (`check_kills`).

    Args:
        make_loop: `make_loop(reader) -> TrainLoop(model=reader(model), ...)`: creates a new loop
            and its data; the model must be passed through `reader`. A name instead of a function,
            'module:function' or 'file.py:function', runs only the part with processes.
        n_steps: Total number of steps; the loop's own by default.
        at: The step to resume from, where the loop yields; near the middle by default.
        n_kills: Number of times a process is killed; 4 by default, or 0 for a function that a
            new process cannot import, such as a lambda.

    Raises:
        AssertionError: If a bit differs; names the step and the leaf.
        RuntimeError: If a process fails by itself.
        ValueError: If there is no checkpoint before the end to resume from, or kills are
            requested and a new process cannot import the function.
    """
    if not isinstance(make_loop, str):
        _check_in_process(make_loop, n_steps, at)
    if n_kills is None:
        n_kills = 4 if kills.import_path(make_loop) else 0
    if n_kills:
        kills.check_kills(make_loop, n_kills=n_kills, n_steps=n_steps)


def _check_in_process(
    make_loop: Callable[[Callable[[Any], Any]], TrainLoop], n_steps: int | None, at: int | None
) -> None:
    loop = make_loop(lambda target: target)
    n_steps = loop.n_steps if n_steps is None else n_steps
    if n_steps is None:
        raise ValueError("check_resume needs n_steps: this loop has no n_steps of its own.")
    if at is None:
        every = loop.n_steps_per_checkpoint
        at = max(1, n_steps // 2 // every) * every
    losses, reader, last = {}, None, None
    for checkpoint in loop.until(n_steps):
        losses[checkpoint.step], last = checkpoint.loss, checkpoint
        if checkpoint.step == at:
            reader = _Reader(checkpoint)
    if reader is None or last is None or last.step == at:
        raise ValueError(f"There is no checkpoint at step {at} before the end; got {list(losses)}.")
    _check_resumed(make_loop(reader), n_steps, at, losses=losses, last=last)


def _check_resumed(
    loop: TrainLoop, n_steps: int, at: int, *, losses: dict[int, Any], last: Checkpoint
) -> None:
    if loop.step != at:
        raise AssertionError(
            f"The loop should resume from step {at}, but it starts at {loop.step}: make_loop must "
            "pass its model through the reader, TrainLoop(model=reader(model), ...)."
        )
    for checkpoint in loop.until(n_steps):
        expected = {"loss": losses.get(checkpoint.step)}
        with _at_step(checkpoint.step):
            compare.assert_trees_equal(expected, {"loss": checkpoint.loss})
    with _at_step(loop.step):
        compare.assert_trees_equal(vars(last.state), vars(loop.state))
        data_state = loop.checkpoint().data_state
        if last.data_state != data_state:
            raise AssertionError(f"The data position differs: {last.data_state} and {data_state}.")


@contextlib.contextmanager
def _at_step(step: int) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"The resumed run differs at step {step}. {error}") from None


class _Reader:
    """Restores a checkpoint that was converted to numpy and JSON, as a file would be."""

    def __init__(self, checkpoint: Checkpoint):
        self.target: Any = None
        self._leaves, self._treedef = jax.tree.flatten(checkpoint.state)
        self._arrays = [np.array(trees.to_numpy(x)) for x in self._leaves]
        self._data_state = json.loads(json.dumps(checkpoint.data_state))
        self._facts = json.loads(json.dumps(dict(checkpoint.facts)))

    def __call__(self, target: Any) -> "_Reader":
        reader = copy.copy(self)
        reader.target = target
        return reader

    def restore(self, fresh: TrainState) -> Restored:
        if jax.tree.structure(fresh) != self._treedef:
            raise AssertionError(
                "make_loop returned a model or an optimizer with another structure the second time."
            )
        leaves = [_to_jax(x, like) for x, like in zip(self._arrays, self._leaves, strict=True)]
        state = jax.tree.unflatten(self._treedef, leaves)
        return Restored(state=state, data_state=self._data_state, facts=self._facts)


def _to_jax(x: np.ndarray, like: Any) -> jax.Array:
    array = jax.numpy.array(x)
    if trees.is_key(like):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    return array
