"""Views: parameters followed through operations that only move their entries.

A kernel that is transposed, reshaped, sliced or joined with others is still that kernel. A
`View` holds which axes of the parameter lie along each axis of the value, so that the
operation that finally uses the value knows which of them it contracts.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

NEW = -1  # An axis added by broadcasting or joining, which is not one of the parameter.

Piece = tuple[int, int]  # (axis of the parameter or NEW, number of entries along it)
Part = tuple[tuple[int, int, int], ...]  # (axis of the parameter, start, stop) of each slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Identifies a value as a parameter, and locates the parameter's axes in the value.

    >>> kernel = View.whole(0, (3, 8))
    >>> kernel.reshaped((3, 2, 4)).transposed((1, 0, 2)).axes
    (((1, 2),), ((0, 3),), ((1, 4),))
    """

    param: int  # Position among the parameters.
    axes: tuple[tuple[Piece, ...], ...]  # Per axis of the value; the sizes multiply to its size.
    part: Part = ()  # Which slice of the parameter; () for all of it.
    gain: float = 1.0  # Product of the constants it was multiplied by.
    offset: float = 0.0  # Rms of the constants that were added, as in `1 + scale`.
    shards: tuple[Piece, ...] = ()  # Axes divided among devices, and the number of shards.

    @classmethod
    def whole(cls, param: int, shape: Sequence[int]) -> "View":
        """Returns the view of a complete, unchanged parameter."""
        return cls(param=param, axes=tuple(((i, n),) for i, n in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(math.prod(size for _, size in pieces) for pieces in self.axes)

    def param_axes(self, axes: Iterable[int]) -> frozenset[int]:
        """Returns the axes of the parameter, longer than 1, along these axes of the value."""
        return frozenset(axis for i in axes for axis, n in self.axes[i] if axis != NEW and n > 1)

    def n_shards(self, param_axes: Iterable[int]) -> int:
        """Returns the number of shards that these axes of the parameter are divided into."""
        return math.prod(n for axis, n in self.shards if axis in set(param_axes))

    def transposed(self, permutation: Sequence[int]) -> "View":
        """Reorders the axes."""
        return self._with_axes(self.axes[i] for i in permutation)

    def squeezed(self, dimensions: Sequence[int]) -> "View":
        """Drops axes of size 1."""
        return self._with_axes(p for i, p in enumerate(self.axes) if i not in dimensions)

    def broadcast(self, shape: Sequence[int], dimensions: Sequence[int]) -> "View":
        """Moves axis i of the value to `dimensions[i]` of `shape`; other axes are new."""
        axes = [_new(n) for n in shape]
        for pieces, d in zip(self.axes, dimensions, strict=True):
            is_single = math.prod(n for _, n in pieces) == 1
            axes[d] = pieces + axes[d] if is_single else pieces
        return self._with_axes(axes)

    def reshaped(self, shape: Sequence[int]) -> "View | None":
        """Regroups the axes; returns None if the sizes of an axis do not divide."""
        pieces = collections.deque(piece for axis in self.axes for piece in axis)
        axes = []
        for n in shape:
            axis = pop_pieces(pieces, n)
            if axis is None:
                return None
            axes.append(axis)
        return self._with_axes(axes)

    def sliced(self, starts: Sequence[int], sizes: Sequence[int]) -> "View":
        """Selects `sizes[i]` entries from `starts[i]` on along each axis."""
        axes, part = list(self.axes), self.part
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            if size != self.shape[i]:
                axes[i], cut = _cut(self.axes[i], start, size)
                part += cut
        return dataclasses.replace(self, axes=tuple(axes), part=part)

    def within(self, shape: Sequence[int]) -> "View":
        """Extends the axes to the shape of a larger array that it was joined into."""
        axes = list(self.axes)
        for i, (own_size, size) in enumerate(zip(self.shape, shape, strict=True)):
            if size != own_size:
                is_repeat = size % own_size == 0
                pieces = _new(size // own_size) + axes[i]
                axes[i] = pieces if is_repeat else ((_main(axes[i]), size),)
        return self._with_axes(axes)

    def sharded(self, shape: Sequence[int]) -> "View":
        """Restricts it to the shard on one device, which has this shape."""
        axes, shards = list(self.axes), self.shards
        for i, (size, shard_size) in enumerate(zip(self.shape, shape, strict=True)):
            if shard_size != size:
                axis = _main(self.axes[i])
                axes[i] = ((axis, shard_size),)
                shards += ((axis, size // shard_size),)
        return dataclasses.replace(self, axes=tuple(axes), shards=shards)

    def scaled(self, factor: float) -> "View":
        """Multiplies it by a constant."""
        return dataclasses.replace(self, gain=self.gain * factor, offset=self.offset * factor)

    def shifted(self, rms: float) -> "View":
        """Adds a constant of this rms."""
        return dataclasses.replace(self, offset=math.hypot(self.offset, rms))

    def _with_axes(self, axes: Iterable[tuple[Piece, ...]]) -> "View":
        return dataclasses.replace(self, axes=tuple(axes))


def _new(size: int) -> tuple[Piece, ...]:
    return ((NEW, size),) if size > 1 else ()


def _main(pieces: Sequence[Piece]) -> int:
    """Returns the parameter axis with the most entries among these pieces."""
    return max(pieces, key=lambda piece: (piece[0] != NEW, piece[1]), default=(NEW, 1))[0]


def pop_pieces(pieces: collections.deque[Piece], n: int) -> tuple[Piece, ...] | None:
    """Removes pieces with n entries in total from the front, splitting the last if needed."""
    if n == 1:
        return (pieces.popleft(),) if pieces and pieces[0][1] == 1 else ()
    popped = []
    while n > 1:
        if not pieces:
            return None
        axis, size = pieces.popleft()
        if n % size and size % n:
            return None
        if size > n:
            pieces.appendleft((axis, size // n))
        popped.append((axis, min(size, n)))
        n //= min(size, n)
    return tuple(popped)


def _cut(pieces: tuple[Piece, ...], start: int, size: int) -> tuple[tuple[Piece, ...], Part]:
    """Slices an axis; returns its remaining pieces and which part of the parameter they are."""
    inner = math.prod(n for _, n in pieces[1:])
    axis = pieces[0][0]
    if inner == size and start % size == 0:
        index = start // size
        return pieces[1:], () if axis == NEW else ((axis, index, index + 1),)
    axis = _main(pieces)
    remaining = ((axis, size),) if size > 1 else ()
    return remaining, () if axis == NEW else ((axis, start, start + size),)
