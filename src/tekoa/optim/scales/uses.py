"""The kinds of use of a parameter and the scale that each implies.

Every use in the model is added to a `UseRecord`. Uses of the same kind on the same axes are
pooled, such as those of a recurrent kernel over time steps. If a parameter is used in
different ways, like a tied embedding, the smallest scale counts.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from tekoa.optim.scales import roles, views

BIAS_SCALE = 0.5  # Scale of a bias relative to the rms of the data it is added to.


@dataclasses.dataclass(frozen=True)
class UseKind:
    """A way of using a parameter, with its formula for the scale."""

    verb: str
    role: roles.Kind
    eta: Callable[[float, float], float]  # (number of terms, mean square of the other operand).
    weak: bool = False  # Counts only if there is no other use.
    shrinks: bool = True  # Whether a constant factor on the parameter divides its scale.


CONTRACTED = UseKind("contracted", "contracted", lambda n_terms, ms: 1 / math.sqrt(n_terms * ms))
# Two parameters that are contracted share the scale: n * eta**4 = 1.
PAIRED = UseKind("contracted with a parameter", "paired", lambda n_terms, ms: n_terms**-0.25)
ADDED = UseKind("added to data", "added", lambda n_terms, ms: BIAS_SCALE * math.sqrt(ms))
JOINED = UseKind("placed beside data", "placed", lambda n_terms, ms: math.sqrt(ms))
MULTIPLIED = UseKind("multiplied", "multiplied", lambda n_terms, ms: 1.0, shrinks=False)
# In `x * (1 + scale)` the sum has the scale of the constant, the parameter that of a bias.
MULTIPLIED_SUM = UseKind("multiplied", "multiplied", lambda n_terms, ms: BIAS_SCALE * math.sqrt(ms))
LOOKED_UP = UseKind("looked up", "looked up", lambda n_terms, ms: 1.0, shrinks=False)
ARGUMENT = UseKind("argument", "argument", lambda n_terms, ms: 1.0, weak=True, shrinks=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """One way in which a parameter, or a slice of it, is used."""

    kind: UseKind
    reduced: frozenset[int] = frozenset()  # Axes over which the parameter's slots are averaged.
    n_terms: float = 1  # Number of products summed in a contraction.
    part: views.Part = ()  # Which slice; () for the full parameter.
    target: float = 1.0  # The rms that the result should have.
    detail: str = ""  # Added to the reason.
    # The axes of the parameter; the same for all occurrences of a use.
    role: roles.Role = dataclasses.field(default=roles.UNKNOWN, compare=False)


@dataclasses.dataclass
class Pool:
    """Mean squares of the other operand, over all occurrences of one use."""

    total: float = 0.0
    n: int = 0

    def eta(self, use: Use) -> float:
        """Returns the scale that this use implies."""
        return use.target * use.kind.eta(use.n_terms, self.total / self.n)


@dataclasses.dataclass
class UseRecord:
    """All uses of all parameters, in the order of the model's computation."""

    by_param: dict[int, dict[Use, Pool]] = dataclasses.field(default_factory=dict)
    # Why a use of the parameter implies no scale.
    notes: dict[int, str] = dataclasses.field(default_factory=dict)
    # Kernel -> the kernels whose results it is contracted with.
    fed_by: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    # Sets of parameters whose results are added or concatenated.
    neighbours: list[set[int]] = dataclasses.field(default_factory=list)
    # Bits of the uses, as in `Value.uses`, whose result another kernel is applied to.
    followed: int = 0
    # Bit of a kernel's use -> the number of kernels on the longest path up to and with it.
    depths: dict[int, int] = dataclasses.field(default_factory=dict)
    # Kernel -> whether its result is added to what it was computed from.
    is_residual: dict[int, bool] = dataclasses.field(default_factory=dict)
    _deepened: set[tuple[int, views.Part]] = dataclasses.field(default_factory=set)
    _bits: dict[tuple[int, UseKind | Use], int] = dataclasses.field(default_factory=dict)
    _new_bits: int = 0
    _in_branches: int = 0  # Bits of the uses between a stream and what is added to it.
    _in_streams: int = 0  # Bits of the uses in streams that kernels are added to again and again.
    _repeated: set[int] = dataclasses.field(default_factory=set)  # Applied to their own results.
    _order: dict[tuple[int, views.Part], int] = dataclasses.field(default_factory=dict)

    def order(self, view: views.View) -> int:
        """Numbers parameters by first use, so that random draws do not depend on names."""
        return self._order.setdefault((view.param, view.part), len(self._order))

    def add(self, view: views.View, use: Use, ms: float = 1.0, data_uses: int = 0) -> None:
        """Records a use with another operand of mean square `ms` and the uses `data_uses`."""
        if ms <= 0 or not math.isfinite(ms):
            self.note(view, f"{use.kind.verb} only with data that is {'zero' if ms <= 0 else ms}")
            return
        if use.kind.shrinks:
            gain = view.gain**2 or 1.0
            ms = ms * gain if use.kind is CONTRACTED else ms / gain
        use = dataclasses.replace(use, part=view.part)
        bit = self._bit_of(view.param, use.kind)
        self._new_bits |= bit
        # Only when it is first applied: a recurrent kernel is one layer, whatever the time.
        if use.kind.role in roles.KERNELS and (view.param, view.part) not in self._deepened:
            self._deepened.add((view.param, view.part))
            self.depths[bit] = max(self.depths.get(bit, 0), 1 + self.depth_of(data_uses))
        if use.kind is CONTRACTED:
            self._add_recurrence(view.param, use, data_uses)
        pool = self.by_param.setdefault(view.param, {}).setdefault(use, Pool())
        pool.total, pool.n = pool.total + ms, pool.n + 1

    def _add_recurrence(self, param: int, use: Use, data_uses: int) -> None:
        # A bit of its own: layers of a stack, and both uses of a tied kernel, are different.
        bit = self._bit_of(param, use)
        self._new_bits |= bit
        if bit & data_uses:
            self._repeated.add(param)

    def depth_of(self, bits: int) -> int:
        """Returns the number of kernels on the longest path through any of these uses."""
        return max((depth for bit, depth in self.depths.items() if bit & bits), default=0)

    def add_weight(self, weight_uses: int, data_uses: int) -> None:
        """Notes that a kernel that is computed from parameters is applied to data."""
        self.followed |= data_uses
        if weight_uses and not self.depth_of(weight_uses):
            self.depths[weight_uses] = 1 + self.depth_of(data_uses)

    def add_sum(self, kernels: Sequence[int], own_uses: int, other_uses: int) -> None:
        """Notes that the result of kernels, with `own_uses`, is added to other data."""
        for kernel in kernels:
            earlier_uses = own_uses & ~self._bits_of(kernel)
            # As for the depth, the first time counts: later, a recurrent state has all uses.
            if self.is_residual.setdefault(kernel, not other_uses & ~earlier_uses):
                self._in_branches |= own_uses & ~other_uses
            if other_uses & self._bits_of(kernel):
                self._in_streams |= own_uses

    @property
    def n_branches(self) -> int:
        """The number of kernels, with each layer of a stack, that end a residual branch."""
        return sum(self.is_residual.get(param, False) for param, _ in self._deepened)

    def is_in_branch(self, param: int) -> bool:
        """Whether all uses of a parameter are in residual branches."""
        bits = self._bits_of(param)
        return bool(bits) and not bits & ~self._in_branches

    def is_recurrent(self, param: int) -> bool:
        """Whether a kernel is applied to its own results, not in layers of shared weights.

        Those add to a stream that has their earlier results already.
        """
        in_layer = self.is_in_branch(param) and bool(self._bits_of(param) & self._in_streams)
        return param in self._repeated and not in_layer

    def depth_of_param(self, param: int) -> int:
        """Returns the depth of a parameter as a kernel, 0 if it is none."""
        return self.depth_of(self._bits_of(param))

    def _bit_of(self, param: int, key: UseKind | Use) -> int:
        return self._bits.setdefault((param, key), 1 << len(self._bits))

    def _bits_of(self, param: int) -> int:
        """Returns the bits of all kinds of use of a parameter."""
        return sum(
            bit for (i, key), bit in self._bits.items() if i == param and isinstance(key, UseKind)
        )

    def take_new_bits(self) -> int:
        """Returns the bits of the uses added since the last call."""
        bits, self._new_bits = self._new_bits, 0
        return bits

    def is_followed(self, param: int, kind: UseKind) -> bool:
        """Whether another kernel is applied to the result of this use."""
        return bool(self._bits.get((param, kind), 0) & self.followed)

    def note(self, view: views.View, reason: str) -> None:
        """Notes why a use implies no scale, which is shown if no other use implies one."""
        self.notes.setdefault(view.param, reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleDecision:
    """The scale and slot shape of a parameter, decided from all of its uses.

    The fields are those of `table.ScaleRow`.
    """

    eta: float
    eta_by_slice: np.ndarray | None  # If slices differ; broadcasts to the parameter.
    slot_shape: tuple[int, ...]
    reason: str
    use: Use  # The one that decides.
    is_tied: bool  # Whether it is a kernel in more than one way.


def decide(pools: dict[Use, Pool], shape: tuple[int, ...]) -> ScaleDecision:
    """Decides the scale of a parameter of this shape from its uses, at least one."""
    strong = {use: pool for use, pool in pools.items() if not use.kind.weak} or pools
    by_part: dict[views.Part, tuple[float, Use]] = {}
    for use, pool in strong.items():
        eta = pool.eta(use)
        if use.part not in by_part or eta < by_part[use.part][0]:
            by_part[use.part] = (eta, use)
    full = by_part.pop((), None)
    etas = [eta for eta, _ in by_part.values()]
    # The geometric mean stands for the typical slice.
    sliced = math.exp(sum(map(math.log, etas)) / len(etas)) if etas else math.inf
    if full is not None and full[0] <= sliced:
        return _decision(*full, None, strong, shape)
    by_slice = None if full is not None else _etas_by_slice(by_part, shape)
    use = min(by_part.values(), key=lambda eta_and_use: eta_and_use[0])[1]
    return _decision(sliced, use, by_slice, strong, shape)


def _decision(
    eta: float,
    use: Use,
    by_slice: np.ndarray | None,
    pools: dict[Use, Pool],
    shape: tuple[int, ...],
) -> ScaleDecision:
    reason = _describe(use, pools[use])
    others = {
        (other.kind.verb, tuple(sorted(other.reduced))): pool.eta(other)
        for other, pool in pools.items()
        if (other.kind, other.reduced) != (use.kind, use.reduced)
    }
    if others:
        also = ", ".join(f"{verb} ({other:.3g})" for (verb, _), other in others.items())
        tied = "tied, " if any(other.kind is LOOKED_UP for other in pools) else ""
        reason += f"; {tied}also {also}: the smaller counts"
    if by_slice is not None:
        reason += f"; {by_slice.size} slices, {by_slice.min():.3g} to {by_slice.max():.3g}"
    slot_shape = _slot_shape(use, shape)
    ways = {(other.kind, other.reduced) for other in pools if other.kind.role in roles.KERNELS}
    return ScaleDecision(
        eta=eta,
        eta_by_slice=by_slice,
        slot_shape=slot_shape,
        reason=reason,
        use=use,
        is_tied=len(ways) > 1,
    )


def _slot_shape(use: Use, shape: tuple[int, ...]) -> tuple[int, ...]:
    slots = tuple(1 if i in use.reduced else n for i, n in enumerate(shape))
    is_kernel = len(shape) > 1 and use.kind in (CONTRACTED, PAIRED, LOOKED_UP)
    return slots if is_kernel or max(slots, default=1) > 1 else ()


def _describe(use: Use, pool: Pool) -> str:
    rms = math.sqrt(pool.total / pool.n)
    match use.kind.verb:
        case "contracted":
            axes = ", ".join(map(str, sorted(use.reduced)))
            text = f"contracted over axes {axes}: {use.n_terms:g} terms of rms {rms:.3g}"
        case "contracted with a parameter":
            text = f"contracted with a parameter: {use.n_terms:g} terms shared by both"
        case "added to data" | "placed beside data":
            text = f"{use.kind.verb} of rms {rms:.3g}"
        case verb:
            text = verb
    return f"{text} {use.detail}".rstrip()


def _etas_by_slice(
    by_part: dict[views.Part, tuple[float, Use]], shape: tuple[int, ...]
) -> np.ndarray | None:
    """Returns one scale per index of the stacked axis; None if slices are alike or irregular."""
    if any(len(part) != 1 or part[0][2] != part[0][1] + 1 for part in by_part):
        return None
    axes = {part[0][0] for part in by_part}
    if len(axes) != 1 or len(by_part) != shape[axis := axes.pop()] or len(by_part) < 2:
        return None
    etas = np.array([by_part[part][0] for part in sorted(by_part, key=lambda part: part[0][1])])
    if etas.max() < 1.05 * etas.min():
        return None
    return etas.reshape([-1 if i == axis else 1 for i in range(len(shape))])
