"""Checks that users can run on their own models and steps."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tekoa.core import trees
from tekoa.core.state import TrainState
from tekoa.loop.task import Restored

if TYPE_CHECKING:
    from tekoa.loop.checkpoint import Checkpoint
    from tekoa.loop.train import TrainLoop

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """What was compiled since `count_compilations` was entered."""

    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """How many compilations there were."""
        return len(self.names)


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts what XLA compiles inside the `with` block, by all threads.

    Operations outside of `jit` are compiled one by one, and count: compute what a check
    does not mean, such as new inputs, before it.

    Yields:
        A record with `total` and the `names` of what was compiled; it stays readable.

    >>> step = jax.jit(lambda x: x + 1)
    >>> with count_compilations() as compiled:
    ...     _ = step(np.float32(1)), step(np.float32(2))
    >>> compiled.total
    1
    """
    record = Compilations()

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs
        if event == _COMPILE_EVENT:
            record.names.append(str(kwargs.get("fun_name", "unknown")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield record
    finally:
        # Someone may have cleared all listeners inside.
        with contextlib.suppress(ValueError, AssertionError):
            jax.monitoring.unregister_event_duration_listener(listen)


def assert_trees_equal(a: trees.PyTree, b: trees.PyTree) -> None:
    """Fails unless both trees have the same structure, types, shapes and bits.

    A NaN equals a NaN of the same bits; 0.0 does not equal -0.0.

    Raises:
        AssertionError: With the leaf, the index and both values of the first difference.

    >>> assert_trees_equal({'w': np.zeros(2)}, {'w': np.zeros(2)})
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise AssertionError(
            f"The trees differ in structure: {jax.tree.structure(a)} and {jax.tree.structure(b)}."
        )
    rows = zip(trees.leaf_names(a), jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    for name, x, y in rows:
        _assert_leaves_equal("/".join(name), _as_numpy(x), _as_numpy(y))


def _as_numpy(x: Any) -> np.ndarray:
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _assert_leaves_equal(name: str, x: np.ndarray, y: np.ndarray) -> None:
    if x.dtype != y.dtype or x.shape != y.shape:
        raise AssertionError(
            f"Leaf {name!r} differs in type: {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}."
        )
    differs = _bits(x) != _bits(y)
    if not differs.any():
        return
    flat_index = int(np.argmax(differs))
    index = tuple(int(i) for i in np.unravel_index(flat_index, x.shape))
    raise AssertionError(
        f"Leaf {name!r} differs at index {index}: {x[index]!r} and {y[index]!r}; "
        f"{int(differs.sum())} of {x.size} entries differ."
    )


def _bits(x: np.ndarray) -> np.ndarray:
    """One row of bytes per entry, told apart by any bit."""
    if x.dtype == object:
        return np.ravel(x)
    width = np.dtype((np.void, x.dtype.itemsize))
    return np.ascontiguousarray(x).reshape(-1).view(width)


def check_resume(
    make_loop: Callable[[Callable[[Any], Any]], "TrainLoop"] | str,
    *,
    n_steps: int | None = None,
    at: int | None = None,
    n_kills: int | None = None,
) -> None:
    """Fails unless a resumed run gives the bits of one that was not interrupted.

    Trains to the end, then once more from a checkpoint in the middle, and compares the
    losses on the way, the last state and the position in the data. Then does it with real
    processes, checkpoints on disk, SIGKILL and SIGTERM at random moments, and compares
    every leaf of the state at every checkpoint (`tekoa.resume_check.check_kills`).

    Args:
        make_loop: `make_loop(reader) -> TrainLoop(init=reader(model), ...)`: makes the loop
            and its data anew, with its model passed through the function it is given. Its
            name, 'module:function' or 'file.py:function', leaves out the first part.
        n_steps: Steps in total; those of the loop by default.
        at: The step to resume from, one at which the loop yields; near the middle by default.
        n_kills: How often a process is killed; 4 by default, or 0 for a function that a
            new process cannot import, such as a lambda.

    Raises:
        AssertionError: It names the step and the leaf.
        RuntimeError: If a process fails by itself.
        ValueError: If there is no checkpoint before the end to resume from, or kills are
            asked for and a new process cannot import the function.
    """
    from tekoa import resume_check

    if not isinstance(make_loop, str):
        _check_here(make_loop, n_steps, at)
    if n_kills is None:
        n_kills = 4 if resume_check.import_path(make_loop) else 0
    if n_kills:
        resume_check.check_kills(make_loop, n_kills=n_kills, n_steps=n_steps)


def _check_here(
    make_loop: Callable[[Callable[[Any], Any]], "TrainLoop"], n_steps: int | None, at: int | None
) -> None:
    loop = make_loop(lambda target: target)
    n_steps = loop.n_steps if n_steps is None else n_steps
    if n_steps is None:
        raise ValueError("check_resume needs n_steps: this loop has no end of its own.")
    if at is None:
        every = loop.n_steps_per_checkpoint
        at = max(1, n_steps // 2 // every) * every
    losses, saved, last = {}, None, None
    for checkpoint in loop(n_steps=n_steps):
        losses[checkpoint.step], last = checkpoint.loss, checkpoint
        if checkpoint.step == at:
            saved = _Saved(checkpoint)
    if saved is None or last is None or last.step == at:
        raise ValueError(f"There is no checkpoint at step {at} before the end; got {list(losses)}.")
    _check_again(make_loop(saved.reader), n_steps, at, losses=losses, last=last)


def _check_again(
    loop: "TrainLoop", n_steps: int, at: int, *, losses: dict[int, Any], last: "Checkpoint"
) -> None:
    if loop.step != at:
        raise AssertionError(
            f"The loop was to go on from step {at}, but starts at {loop.step}: make_loop must "
            "pass its model through the function it is given, init=reader(model)."
        )
    for checkpoint in loop(n_steps=n_steps):
        expected = {"loss": losses.get(checkpoint.step)}
        with _at_step(checkpoint.step):
            assert_trees_equal(expected, {"loss": checkpoint.loss})
    with _at_step(loop.step):
        assert_trees_equal(_record(last.state), _record(loop.state))
        if last.data_state != (seen := loop.checkpoint().data_state):
            raise AssertionError(f"The position in the data differs: {last.data_state} and {seen}.")


@contextlib.contextmanager
def _at_step(step: int) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"The resumed run differs at step {step}. {error}") from None


def _record(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


class _Saved:
    """A checkpoint that went through what a file goes through: numpy and JSON."""

    def __init__(self, checkpoint: "Checkpoint"):
        self._leaves, self._treedef = jax.tree.flatten(checkpoint.state)
        self._arrays = [np.array(_as_numpy(x)) for x in self._leaves]
        self._data_state = json.loads(json.dumps(checkpoint.data_state))
        self._facts = json.loads(json.dumps(dict(checkpoint.facts)))

    def reader(self, target: Any) -> "_SavedReader":
        return _SavedReader(target, self)

    def restored(self) -> Restored:
        leaves = [_as_jax(x, like) for x, like in zip(self._arrays, self._leaves, strict=True)]
        state = jax.tree.unflatten(self._treedef, leaves)
        return Restored(state=state, data_state=self._data_state, facts=self._facts)


class _SavedReader:
    def __init__(self, target: Any, saved: _Saved):
        self.target, self._saved = target, saved

    def restore(self, fresh: TrainState) -> Restored:
        restored = self._saved.restored()
        if jax.tree.structure(fresh) != jax.tree.structure(restored.state):
            raise AssertionError(
                "make_loop made a model or an optimizer of another structure the second time."
            )
        return restored


def _as_jax(x: np.ndarray, like: Any) -> jax.Array:
    array = jax.numpy.array(x)
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    return array
