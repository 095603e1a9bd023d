"""Watches code while it runs: how often each line ran, and the variables of a call at its end."""

import collections
import sys
import types
from collections.abc import Callable, Collection
from typing import Any


class Watch:
    """Counts the lines that run in some files, and stores the variables of calls.

    Only the thread that enters it is watched.

    Args:
        files: Files of which the lines are counted, and all calls are stored.
        functions: Functions of other files of which the calls are stored.

    Attributes:
        lines: How often each line ran, by file.
        calls: The variables of every call when it ended, by code object.
        results: What the calls returned, in the same order.

    >>> def half(x):
    ...     y = x / 2
    ...     return y
    >>> with Watch(functions=[half]) as watch:
    ...     _ = half(3)
    >>> watch.variables(half)
    [{'x': 3, 'y': 1.5}]
    """

    def __init__(self, files: Collection[str] = (), functions: Collection[Callable[..., Any]] = ()):
        self._codes = {_code_of(function) for function in functions}
        self.lines = {file: collections.Counter[int]() for file in files}
        self.calls: dict[types.CodeType, list[dict[str, Any]]] = collections.defaultdict(list)
        self.results: dict[types.CodeType, list[Any]] = collections.defaultdict(list)
        self._arguments: dict[int, dict[str, Any]] = {}  # Of the calls that have not ended.
        self._previous: Any = None

    def __enter__(self) -> "Watch":
        self._previous = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._previous)

    def variables(self, function: Callable[..., Any]) -> list[dict[str, Any]]:
        """Returns the variables of each call of a function when it ended."""
        return self.calls.get(_code_of(function), [])

    def returned(self, function: Callable[..., Any]) -> list[Any]:
        """Returns what each call of a function returned."""
        return self.results.get(_code_of(function), [])

    def _trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        counts = self.lines.get(code.co_filename)
        if counts is None and code not in self._codes:
            return None
        if event == "call":
            self._arguments[id(frame)] = dict(frame.f_locals)
        elif event == "line" and counts is not None:
            counts[frame.f_lineno] += 1
        elif event == "return":
            arguments = self._arguments.pop(id(frame), {})
            self.calls[code].append({**arguments, **frame.f_locals})
            self.results[code].append(arg)
        return self._trace


def _code_of(function: Callable[..., Any]) -> types.CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function.__code__
