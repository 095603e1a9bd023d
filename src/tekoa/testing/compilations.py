"""Counts compilations, to check that a step is compiled only once."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """The compilations since `count_compilations` was entered."""

    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of compilations."""
        return len(self.names)


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts XLA compilations inside the `with` block, in all threads.

    Operations outside of `jit` are compiled one by one and are counted too: create new inputs
    before the block.

    Yields:
        A record with the `total` and the `names` of the compiled functions; it can be read after
        the block.

    >>> step = jax.jit(lambda x: x + 1)
    >>> with count_compilations() as compiled:
    ...     _ = step(1.0), step(2.0)
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
        # The block may have cleared all listeners.
        with contextlib.suppress(ValueError, AssertionError):
            jax.monitoring.unregister_event_duration_listener(listen)
