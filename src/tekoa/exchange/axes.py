"""Expressions for the order and the merging of an array's axes.

`"d h k -> (h k) d"` moves the first axis to the end and merges the other two into one. `1` on the
left is an axis of size 1, which is removed.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Axes(NamedTuple):
    """A parsed expression: the axes before, and the groups of axes after."""

    before: tuple[str, ...]
    after: tuple[tuple[str, ...], ...]


def parse(text: str) -> Axes:
    """Parses an expression such as "i o -> o i".

    Raises:
        ValueError: If both sides do not have the same axes, each once.

    >>> parse('d h k -> (h k) d')
    Axes(before=('d', 'h', 'k'), after=(('h', 'k'), ('d',)))
    """
    left, arrow, right = text.partition("->")
    before = tuple(left.split())
    after = []
    for i, part in enumerate(right.replace(")", "(").split("(")):
        names = tuple(part.split())
        after += [names] if i % 2 else [(name,) for name in names]
    named = [name for name in before if name != "1"]
    if (
        not arrow
        or right.count("(") != right.count(")")
        or len(set(named)) != len(named)
        or sorted(named) != sorted(name for group in after for name in group)
    ):
        raise ValueError(
            f"Axes {text!r} must have the form 'a b c -> (b c) a', with the same "
            "axes on both sides."
        )
    return Axes(before, tuple(after))


def arrange(x: Any, text: str) -> np.ndarray:
    """Applies an expression to an array.

    Raises:
        ValueError: If the array does not have the axes on the left.

    >>> arrange(np.zeros((4, 2, 3)), 'd h k -> (h k) d').shape
    (6, 4)
    """
    x, axes = np.asarray(x), parse(text)
    if not fits(x.shape, text):
        raise ValueError(f"An array of shape {x.shape} does not have the axes of {text!r}.")
    sizes = dict(zip(axes.before, x.shape, strict=True))
    order = [axes.before.index(name) for group in axes.after for name in group]
    squeezed = [i for i, name in enumerate(axes.before) if name == "1"]
    shape = [math.prod(sizes[name] for name in group) for group in axes.after]
    return x.transpose(order + squeezed).reshape(shape)


def undo(x: Any, text: str, shape: Sequence[int]) -> np.ndarray:
    """Applies an expression backwards, to an array that came from one of this shape.

    Raises:
        ValueError: If an array of that shape does not give one of the shape of `x`.

    >>> undo(arrange(np.zeros((4, 2, 3)), 'd h k -> (h k) d'), 'd h k -> (h k) d', (4, 2, 3)).shape
    (4, 2, 3)
    """
    x, axes = np.asarray(x), parse(text)
    if not fits(shape, text):
        raise ValueError(f"An array of shape {tuple(shape)} does not have the axes of {text!r}.")
    sizes = dict(zip(axes.before, shape, strict=True))
    order = [name for group in axes.after for name in group]
    expected = tuple(math.prod(sizes[name] for name in group) for group in axes.after)
    if x.shape != expected:
        raise ValueError(f"Expected an array of shape {expected}, got {x.shape}.")
    split = x.reshape([sizes[name] for name in order])
    return split.transpose([order.index(n) for n in axes.before if n != "1"]).reshape(shape)


def fits(shape: Sequence[int], text: str) -> bool:
    """Whether an array of a shape has the axes on the left of an expression.

    >>> fits((4, 1), 'o 1 -> o'), fits((4, 2), 'o 1 -> o'), fits((4,), 'o 1 -> o')
    (True, False, False)
    """
    before = parse(text).before
    return len(before) == len(shape) and all(
        n == 1 for name, n in zip(before, shape, strict=True) if name == "1"
    )
