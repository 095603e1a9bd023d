"""Roles: what a parameter does in the model, read off the computation and never off names.

A role says how a parameter is used, which of its axes are summed over, which remain in the
result and which number independent copies, and whether another kernel follows. Optimizers
that treat kernels, tables, biases and outputs differently need nothing else.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Literal

from tekoa.optim.scales import views as views_lib
from tekoa.optim.scales.views import NEW, View

Kind = Literal[
    "contracted",  # With data: the kernel of a dense layer, a convolution, an einsum.
    "paired",  # With another parameter: a low-rank factor.
    "looked up",  # By index or one-hot: an embedding.
    "added",  # To data: a bias, a shift, a position.
    "multiplied",  # With data: a gain.
    "placed",  # Beside data: a class token, a mask token.
    "argument",  # Of exp, tanh, ...
    "unknown",  # Unused, or used in a way that has no rule.
]

KERNELS = ("contracted", "paired", "looked up")  # The kinds that are applied to data.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """What one parameter does in the model.

    >>> Role(kind='contracted', contracted=(1,), free=(2,), batched=(0,)).letters
    'bcf'
    """

    kind: Kind = "unknown"
    contracted: tuple[int, ...] = ()  # Axes summed over, or by which rows are looked up.
    free: tuple[int, ...] = ()  # Axes that remain in the result.
    batched: tuple[int, ...] = ()  # Axes that number copies: layers, experts, groups.
    n_groups: int = 1  # Copies that share an axis, as in a grouped convolution.
    is_output: bool = False  # Whether no other kernel follows before the loss.
    is_tied: bool = False  # Whether it is a kernel in more than one way.
    is_recurrent: bool = False  # Whether it is applied to its own earlier results.

    @property
    def is_kernel(self) -> bool:
        """Whether it is applied to data, not merely added to it or multiplied with it."""
        return self.kind in KERNELS

    @property
    def letters(self) -> str:
        """One letter per axis: contracted, free or batched."""
        letters = {axis: name[0] for name in _AXES for axis in getattr(self, name)}
        return "".join(letters[axis] for axis in sorted(letters))

    def __str__(self) -> str:
        words = [self.letters, "output" if self.is_output else "hidden"]
        words += ["tied" * self.is_tied, "recurrent" * self.is_recurrent]
        return " ".join(filter(None, words)) if self.kind != "unknown" else "unknown"


UNKNOWN = Role()

_AXES = ("contracted", "free", "batched")


def role_of_view(
    view: View,
    kind: Kind,
    *,
    contracted: Collection[int] = (),
    batched: Collection[int] = (),
    groups: tuple[int, int] | None = None,
) -> Role:
    """Returns the role of a parameter from those of the axes of a value that is its view.

    Args:
        view: The parameter in the value.
        kind: How the value is used.
        contracted: Axes of the value that are summed over.
        batched: Axes of the value that number copies.
        groups: An axis of the value and the number of copies along it.
    """
    pieces: dict[str, list[views_lib.Piece]] = {name: [] for name in _AXES}
    for axis, along in enumerate(view.axes):
        name = "contracted" if axis in contracted else "batched" if axis in batched else "free"
        if groups is not None and axis == groups[0] and groups[1] > 1:
            outer, inner = _split(along, groups[1])
            pieces["batched"] += outer
            pieces[name] += inner
        else:
            pieces[name] += along
    axes = {name: {axis for axis, _ in pieces[name] if axis != NEW} for name in _AXES}
    own = axes["contracted"] | axes["free"]
    return Role(
        kind=kind,
        contracted=tuple(sorted(axes["contracted"])),
        free=tuple(sorted(axes["free"] - axes["contracted"])),
        batched=tuple(sorted(axes["batched"] - own)),
        n_groups=math.prod(n for axis, n in pieces["batched"] if axis in own),
    )


def complete(role: Role, shape: Sequence[int]) -> Role:
    """Assigns the axes that the view has lost: those sliced one by one, and those of size 1."""
    unassigned = [
        i for i in range(len(shape)) if i not in {a for n in _AXES for a in _get(role, n)}
    ]
    axes = {name: [*_get(role, name)] for name in _AXES}
    for axis in unassigned:
        name = "free" if role.kind == "unknown" else "batched"
        if shape[axis] == 1 and not axes["contracted"] and role.kind in KERNELS:
            name = "contracted"
        elif shape[axis] == 1:
            name = "free"
        axes[name].append(axis)
    return dataclasses.replace(role, **{name: tuple(sorted(axes[name])) for name in _AXES})


def _get(role: Role, name: str) -> tuple[int, ...]:
    return getattr(role, name)


def _split(
    pieces: Sequence[views_lib.Piece], n: int
) -> tuple[Sequence[views_lib.Piece], Sequence[views_lib.Piece]]:
    """Splits an axis into its `n` groups and what is within a group."""
    remaining = collections.deque(pieces)
    outer = views_lib.pop_pieces(remaining, n)
    return ((), pieces) if outer is None else (outer, tuple(remaining))
