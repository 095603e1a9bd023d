"""Former names of keyword arguments, kept so that existing calls continue to work."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def accept_aliases(**aliases: str) -> Callable[[F], F]:
    """Lets a function accept other names for some of its arguments.

    Args:
        **aliases: Each alias and the parameter that it stands for.

    Returns:
        A decorator. The function raises TypeError if an argument is passed under two names.

    >>> @accept_aliases(rnkey='rng')
    ... def draw(rng):
    ...     return rng
    >>> draw(rnkey=3)
    3
    """

    def decorate(function: F) -> F:
        positions = {name: i for i, name in enumerate(inspect.signature(function).parameters)}
        title = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for alias in aliases.keys() & kwargs.keys():
                name = aliases[alias]
                if name in kwargs or positions[name] < len(args):
                    raise TypeError(
                        f"{title} got {alias!r} in addition to {name!r}; these are two names of "
                        f"the same argument. Pass {name!r} only."
                    )
                kwargs[name] = kwargs.pop(alias)
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate
