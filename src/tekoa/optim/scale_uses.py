"""How a parameter is used decides its scale: the kinds of use and their formulas.

Every use found in the model is written into a `Ledger`. Uses of the same kind on the same
axes are pooled (a recurrent kernel meets every time step); where a parameter is used in
different ways, as a tied embedding is, the smallest scale counts.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from tekoa.optim import scale_views

BIAS_SCALE = 0.5  # Of what is added, relative to the rms of the sum.


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way of using a parameter."""

    verb: str
    eta: Callable[[float, float], float]  # Of the number of terms, the other's mean square.
    weak: bool = False  # Counts only where there is no other use.
    shrinks: bool = True  # Whether a gain upstream makes the parameter that much smaller.


CONTRACTED = Kind("contracted", lambda n_terms, ms: 1 / math.sqrt(n_terms * ms))
# Two parameters contracted with one another share the scale: n * eta**4 = 1.
PAIRED = Kind("contracted with a parameter", lambda n_terms, ms: n_terms**-0.25)
ADDED = Kind("added to data", lambda n_terms, ms: BIAS_SCALE * math.sqrt(ms))
JOINED = Kind("placed beside data", lambda n_terms, ms: math.sqrt(ms))
MULTIPLIED = Kind("multiplied", lambda n_terms, ms: 1.0, shrinks=False)
# As in `x * (1 + scale)`: the sum has the scale of the constant, the parameter that of a bias.
MULTIPLIED_SUM = Kind("multiplied", lambda n_terms, ms: BIAS_SCALE * math.sqrt(ms))
LOOKED_UP = Kind("looked up", lambda n_terms, ms: 1.0, shrinks=False)
ARGUMENT = Kind("argument", lambda n_terms, ms: 1.0, weak=True, shrinks=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """One way in which one part of a parameter is used."""

    kind: Kind
    reduced: frozenset[int] = frozenset()  # Axes over which the parameter's slots are averaged.
    n_terms: float = 1  # How many products are summed in a contraction.
    part: scale_views.Part = ()
    target: float = 1.0  # The rms that the result shall have.
    detail: str = ""


@dataclasses.dataclass
class Pool:
    """Second moments met by one use, over all its occurrences."""

    total: float = 0.0
    n: int = 0

    def eta(self, use: Use) -> float:
        """The scale that this use asks for."""
        return use.target * use.kind.eta(use.n_terms, self.total / self.n)


class Ledger:
    """All uses of all parameters, in the order in which they are met."""

    def __init__(self) -> None:
        self.uses: dict[int, dict[Use, Pool]] = {}
        self.notes: dict[int, str] = {}
        self.fed_by: dict[int, tuple[int, ...]] = {}  # Kernel -> the kernels that give its input.
        self.neighbours: list[set[int]] = []  # Parameters whose results share a space.
        self._seen: dict[tuple[int, scale_views.Part], int] = {}

    def order(self, view: scale_views.View) -> int:
        """Counts parameters by first use, so that no name or layout changes a draw."""
        return self._seen.setdefault((view.param, view.part), len(self._seen))

    def record(self, view: scale_views.View, use: Use, ms: float = 1.0) -> None:
        """Writes down a use beside data of mean square `ms`."""
        if ms <= 0 or not math.isfinite(ms):
            self.note(view, f"{use.kind.verb} only with data that is {'zero' if ms <= 0 else ms}")
            return
        if use.kind.shrinks:
            gain = view.gain**2 or 1.0
            ms = ms * gain if use.kind is CONTRACTED else ms / gain
        use = dataclasses.replace(use, part=view.part)
        pool = self.uses.setdefault(view.param, {}).setdefault(use, Pool())
        pool.total, pool.n = pool.total + ms, pool.n + 1

    def note(self, view: scale_views.View, reason: str) -> None:
        """Writes down why a use gives no scale; shown if no other use does."""
        self.notes.setdefault(view.param, reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """What all uses of a parameter come to."""

    eta: float
    eta_by_slice: np.ndarray | None  # Broadcasts to the parameter, if slices differ.
    slot_shape: tuple[int, ...]
    reason: str


def place(pools: dict[Use, Pool], shape: tuple[int, ...]) -> Placement:
    """Settles the scale of a parameter from its uses.

    Args:
        pools: The uses with the second moments that they met; not empty.
        shape: The parameter's shape.
    """
    strong = {use: pool for use, pool in pools.items() if not use.kind.weak} or pools
    by_part: dict[scale_views.Part, tuple[float, Use]] = {}
    for use, pool in strong.items():
        eta = pool.eta(use)
        if use.part not in by_part or eta < by_part[use.part][0]:
            by_part[use.part] = (eta, use)
    whole = by_part.pop((), None)
    etas = [eta for eta, _ in by_part.values()]
    # The typical slice: the geometric mean.
    sliced = math.exp(sum(map(math.log, etas)) / len(etas)) if etas else math.inf
    if whole is not None and whole[0] <= sliced:
        return _placement(*whole, None, strong, shape)
    by_slice = None if whole is not None else _by_slice(by_part, shape)
    use = min(by_part.values(), key=lambda found: found[0])[1]
    return _placement(sliced, use, by_slice, strong, shape)


def _placement(
    eta: float,
    use: Use,
    by_slice: np.ndarray | None,
    pools: dict[Use, Pool],
    shape: tuple[int, ...],
) -> Placement:
    reason = _described(use, pools[use])
    others = {
        (other.kind.verb, tuple(sorted(other.reduced))): pool.eta(other)
        for other, pool in pools.items()
        if (other.kind, other.reduced) != (use.kind, use.reduced)
    }
    if others:
        also = ", ".join(f"{verb} ({other:.3g})" for (verb, _), other in others.items())
        tied = "tied, " if any(pooled.kind is LOOKED_UP for pooled in pools) else ""
        reason += f"; {tied}also {also}: the smaller counts"
    if by_slice is not None:
        reason += f"; {by_slice.size} slices, {by_slice.min():.3g} to {by_slice.max():.3g}"
    return Placement(
        eta=eta, eta_by_slice=by_slice, slot_shape=_slot_shape(use, shape), reason=reason
    )


def _slot_shape(use: Use, shape: tuple[int, ...]) -> tuple[int, ...]:
    slots = tuple(1 if i in use.reduced else n for i, n in enumerate(shape))
    is_kernel = len(shape) > 1 and use.kind in (CONTRACTED, PAIRED, LOOKED_UP)
    return slots if is_kernel or max(slots, default=1) > 1 else ()


def _described(use: Use, pool: Pool) -> str:
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


def _by_slice(
    by_part: dict[scale_views.Part, tuple[float, Use]], shape: tuple[int, ...]
) -> np.ndarray | None:
    """Lays one scale per index along the axis that all slices index, if they do."""
    if any(len(part) != 1 or part[0][2] != part[0][1] + 1 for part in by_part):
        return None
    axes = {part[0][0] for part in by_part}
    if len(axes) != 1 or len(by_part) != shape[axis := axes.pop()] or len(by_part) < 2:
        return None
    etas = np.array([by_part[part][0] for part in sorted(by_part, key=lambda part: part[0][1])])
    if etas.max() < 1.05 * etas.min():
        return None
    return etas.reshape([-1 if i == axis else 1 for i in range(len(shape))])
