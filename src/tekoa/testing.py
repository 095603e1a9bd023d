"""Checks that users can run on their own models and steps."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tekoa.core import trees

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

    def listen(event: str, duration_seconds: float, **kwargs: Any) -> None:
        del duration_seconds
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
