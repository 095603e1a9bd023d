"""A parameter seen through operations that only move its entries.

A kernel that is transposed, reshaped, sliced or joined with others before it is used is
still that kernel. A `View` remembers which axes of the parameter lie along each axis of
the value, so that the operation that finally uses it can tell which of them it contracts.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

NEW = -1  # An axis that broadcasting or joining added: no axis of the parameter.

Piece = tuple[int, int]  # (axis of the parameter or NEW, how many entries of it)
Part = tuple[tuple[int, int, int], ...]  # (axis of the parameter, start, stop) of each slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Which parameter a value is, and where the parameter's axes went.

    >>> kernel = View.whole(0, (3, 8))
    >>> kernel.reshaped((3, 2, 4)).transposed((1, 0, 2)).axes
    (((1, 2),), ((0, 3),), ((1, 4),))
    """

    param: int  # Position among the parameters.
    axes: tuple[tuple[Piece, ...], ...]  # For each axis of the value; sizes multiply to its size.
    part: Part = ()  # Which slice of the parameter; () for all of it.
    gain: float = 1.0  # What it was multiplied by since.
    offset: float = 0.0  # Rms of what was added to it since, as in `1 + scale`.
    shards: tuple[Piece, ...] = ()  # Axes cut over devices, and into how many pieces.

    @classmethod
    def whole(cls, param: int, shape: Sequence[int]) -> "View":
        """Sees a parameter as it is."""
        return cls(param=param, axes=tuple(((i, n),) if n > 1 else () for i, n in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(math.prod(size for _, size in pieces) for pieces in self.axes)

    def param_axes(self, axes: Iterable[int]) -> frozenset[int]:
        """Axes of the parameter that lie along these axes of the value."""
        return frozenset(axis for i in axes for axis, _ in self.axes[i] if axis != NEW)

    def n_shards(self, param_axes: Iterable[int]) -> int:
        """Into how many pieces devices cut these axes of the parameter."""
        return math.prod(n for axis, n in self.shards if axis in set(param_axes))

    def transposed(self, permutation: Sequence[int]) -> "View":
        """Reorders the axes."""
        return self._with_axes(self.axes[i] for i in permutation)

    def squeezed(self, dimensions: Sequence[int]) -> "View":
        """Drops axes of size 1."""
        return self._with_axes(p for i, p in enumerate(self.axes) if i not in dimensions)

    def broadcast(self, shape: Sequence[int], dimensions: Sequence[int]) -> "View":
        """Puts axis i of the value at `dimensions[i]` of `shape`; the rest is new."""
        axes = [_new(n) for n in shape]
        for pieces, d in zip(self.axes, dimensions, strict=True):
            axes[d] = pieces or axes[d]
        return self._with_axes(axes)

    def reshaped(self, shape: Sequence[int]) -> "View | None":
        """Regroups the axes; None if an axis would be cut where it does not divide."""
        pieces = collections.deque(piece for axis in self.axes for piece in axis)
        axes = []
        for n in shape:
            taken = _take(pieces, n)
            if taken is None:
                return None
            axes.append(taken)
        return self._with_axes(axes)

    def sliced(self, starts: Sequence[int], sizes: Sequence[int]) -> "View":
        """Keeps `sizes[i]` entries from `starts[i]` on along each axis."""
        axes, part = list(self.axes), self.part
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            if size != self.shape[i]:
                axes[i], cut = _cut(self.axes[i], start, size)
                part += cut
        return dataclasses.replace(self, axes=tuple(axes), part=part)

    def within(self, shape: Sequence[int]) -> "View":
        """Sees it as a stretch of something longer, in which other things are joined."""
        axes = list(self.axes)
        for i, (have, size) in enumerate(zip(self.shape, shape, strict=True)):
            if size != have:
                is_repeat = size % have == 0
                pieces = _new(size // have) + axes[i]
                axes[i] = pieces if is_repeat else ((_main(axes[i]), size),)
        return self._with_axes(axes)

    def sharded(self, shape: Sequence[int]) -> "View":
        """Sees one device's share, which has this shape."""
        axes, shards = list(self.axes), self.shards
        for i, (whole, share) in enumerate(zip(self.shape, shape, strict=True)):
            if share != whole:
                axis = _main(self.axes[i])
                axes[i] = ((axis, share),) if share > 1 else ()
                shards += ((axis, whole // share),)
        return dataclasses.replace(self, axes=tuple(axes), shards=shards)

    def scaled(self, factor: float) -> "View":
        """Multiplies it by a number."""
        return dataclasses.replace(self, gain=self.gain * factor, offset=self.offset * factor)

    def shifted(self, rms: float) -> "View":
        """Adds to it something of this rms."""
        return dataclasses.replace(self, offset=math.hypot(self.offset, rms))

    def _with_axes(self, axes: Iterable[tuple[Piece, ...]]) -> "View":
        return dataclasses.replace(self, axes=tuple(axes))


def _new(size: int) -> tuple[Piece, ...]:
    return ((NEW, size),) if size > 1 else ()


def _main(pieces: Sequence[Piece]) -> int:
    """The parameter axis with most entries among these."""
    return max(pieces, key=lambda piece: (piece[0] != NEW, piece[1]), default=(NEW, 1))[0]


def _take(pieces: collections.deque[Piece], n: int) -> tuple[Piece, ...] | None:
    """Takes pieces of n entries in all off the front, splitting the last if need be."""
    taken = []
    while n > 1:
        if not pieces:
            return None
        axis, size = pieces.popleft()
        if n % size and size % n:
            return None
        if size > n:
            pieces.appendleft((axis, size // n))
        taken.append((axis, min(size, n)))
        n //= min(size, n)
    return tuple(taken)


def _cut(pieces: tuple[Piece, ...], start: int, size: int) -> tuple[tuple[Piece, ...], Part]:
    """Cuts a stretch out of an axis; gives what remains and which part that is."""
    inner = math.prod(n for _, n in pieces[1:])
    axis = pieces[0][0]
    if inner == size and start % size == 0:
        index = start // size
        return pieces[1:], () if axis == NEW else ((axis, index, index + 1),)
    axis = _main(pieces)
    remains = ((axis, size),) if size > 1 else ()
    return remains, () if axis == NEW else ((axis, start, start + size),)
