"""How each array of a state is split: from rules over names, from logical axes, by shape.

A rule's value is a tuple with one entry per dimension (a mesh axis, several, or None), or
the name of one mesh axis: then the largest dimension that divides is split over it, and
what does not divide stays whole.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from tekoa.core import rules, trees
from tekoa.core.sharding_mesh import LayoutError

_log = logging.getLogger("tekoa")

Entry = str | tuple[str, ...] | None
Rule = str | jax.P | Sequence[Entry]
Rules = Mapping[str, Rule]
LogicalRules = Sequence[tuple[str, Entry]]
Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Specs = dict[trees.Name, jax.P]


def check_rules(table: Rules, sizes: Sizes, what: str) -> None:
    """Raises if a table names an axis that the mesh does not have, or one twice.

    Raises:
        LayoutError: It names the rule and the axes that are there.
    """
    for pattern, rule in table.items():
        entries = (rule,) if isinstance(rule, str) else tuple(rule)
        used = [axis for entry in entries for axis in _axes(entry)]
        if unknown := [axis for axis in used if axis not in sizes]:
            raise LayoutError(
                f"The rule {pattern!r} of {what} names the axis {unknown[0]!r}, which the mesh "
                f"does not have. Its axes are {', '.join(map(repr, sizes))}."
            )
        if len(set(used)) < len(used):
            raise LayoutError(f"The rule {pattern!r} of {what} names an axis twice: {entries}.")


def named_specs(
    shapes: Mapping[trees.Name, Shape],
    sizes: Sizes,
    *,
    table: Rules,
    logical: Mapping[trees.Name, Sequence[Any]],
    logical_rules: LogicalRules,
) -> Specs:
    """Gives the spec of each array: the first rule that matches, else its logical axes.

    Args:
        shapes: Shape of each array by name.
        sizes: Sizes of the mesh's axes.
        table: Rules over names; a pattern may match anywhere in a name.
        logical: Logical axes of each array that has them.
        logical_rules: Logical axis to mesh axis, as T5X has them.

    Raises:
        LayoutError: If a rule does not fit an array that it matches.
    """
    patterns = rules.compiled(table)
    found: Specs = {}
    for name, shape in shapes.items():
        spec = jax.P()
        if name in logical:
            wanted = from_logical(logical[name], logical_rules, sizes)
            spec = fitting(wanted, shape, sizes)
            if spec != _trimmed(wanted):
                _log.warning(
                    "%s of shape %s does not divide as %s: it is split as %s.",
                    "/".join(name), shape, tuple(wanted), tuple(spec),
                )  # fmt: skip
        rule = rules.first_match(patterns, name)
        if isinstance(rule, str):
            spec = spread(spec, shape, rule, sizes)
        elif rule is not None:
            spec = _checked(jax.P(*rule), name, shape, sizes)
        found[name] = spec
    return found


def from_logical(names: Sequence[Any], logical_rules: LogicalRules, sizes: Sizes) -> jax.P:
    """Turns logical axes into mesh axes.

    Rules go by their order; a mesh axis is used once per array. A name that has no rule and
    is itself a mesh axis stands for it.

    >>> from_logical(('embed', 'mlp'), (('mlp', 'model'), ('embed', 'model')), {'model': 2})
    P(None, 'model')
    """
    entries: list[Entry] = [None] * len(names)
    is_open = [isinstance(name, str) for name in names]
    own = [(name, name) for name in names if name in sizes]
    for logical, entry in [*logical_rules, *own]:
        used = {axis for each in entries for axis in _axes(each)}
        for i, name in enumerate(names):
            if name == logical and is_open[i] and not used & set(_axes(entry)):
                entries[i], is_open[i] = entry, False
                break
    return jax.P(*entries)


def fitting(spec: jax.P, shape: Shape, sizes: Sizes) -> jax.P:
    """Leaves out of a spec what does not divide.

    >>> fitting(jax.P('data', 'model'), (3, 8), {'data': 2, 'model': 4})
    P(None, 'model')
    """
    kept = [
        entry if dim % _n_parts(entry, sizes) == 0 else None
        for entry, dim in zip(spec, shape, strict=False)
    ]
    return _trimmed(kept)


def spread(spec: jax.P, shape: Shape, axis: str, sizes: Sizes) -> jax.P:
    """Splits one more dimension, the largest that divides, over an axis.

    >>> spread(jax.P(None, 'model'), (16, 64), 'data', {'data': 8, 'model': 4})
    P('data', 'model')
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    if sizes[axis] == 1 or axis in {a for entry in entries for a in _axes(entry)}:
        return spec
    local = [dim // _n_parts(entry, sizes) for entry, dim in zip(entries, shape, strict=True)]
    # A dimension that is whole is taken before one that is split already.
    order = sorted(range(len(shape)), key=lambda i: (entries[i] is not None, -local[i], i))
    for i in order:
        if local[i] and local[i] % sizes[axis] == 0:
            entries[i] = axis if entries[i] is None else (*_axes(entries[i]), axis)
            break
    return _trimmed(entries)


def slot_specs(
    slots: Mapping[trees.Name, Shape],
    params: Mapping[trees.Name, Shape],
    param_specs: Mapping[trees.Name, jax.P],
    sizes: Sizes,
    *,
    table: Rules,
) -> Specs:
    """Gives the spec of each array of an optimizer's state.

    A slot is split as its parameter is: the one whose name ends the slot's, else those of
    its shape if they agree. Dimensions that a slot lacks, or has at size 1, are not split.

    Args:
        slots: Shape of each array of the optimizer's state by name.
        params: Shapes of the parameters.
        param_specs: How these are split.
        sizes: Sizes of the mesh's axes.
        table: Rules of the optimizer's own; what cannot be split stays whole.
    """
    patterns = rules.compiled(table)
    by_shape: dict[Shape, set[jax.P]] = {}
    for name, shape in params.items():
        by_shape.setdefault(shape, set()).add(param_specs[name])
    found: Specs = {}
    for name, shape in slots.items():
        owner = next((name[i:] for i in range(len(name)) if name[i:] in params), None)
        alike = by_shape.get(shape, set())
        spec = jax.P()
        if owner is not None:
            spec = _aligned(param_specs[owner], params[owner], shape, sizes)
        elif len(alike) == 1:
            (spec,) = alike
        rule = rules.first_match(patterns, name)
        if isinstance(rule, str):
            spec = spread(spec, shape, rule, sizes)
        elif rule is not None:
            spec = fitting(jax.P(*rule), shape, sizes)
        found[name] = spec
    return found


def _aligned(spec: jax.P, shape: Shape, slot: Shape, sizes: Sizes) -> jax.P:
    """The spec of a slot whose dimensions are the last of its parameter's, or the first."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    extra = len(slot) - len(shape)
    if extra > 0:
        return fitting(jax.P(*[None] * extra, *entries), slot, sizes)
    lasts, firsts = range(-extra, len(shape)), range(len(slot))
    for dims in (lasts, firsts):
        if all(n in (1, shape[i]) for n, i in zip(slot, dims, strict=True)):
            kept = [None if n == 1 else entries[i] for n, i in zip(slot, dims, strict=True)]
            return _trimmed(kept)
    return jax.P()


def _checked(spec: jax.P, name: trees.Name, shape: Shape, sizes: Sizes) -> jax.P:
    if len(spec) > len(shape):
        raise LayoutError(
            f"The rule for {'/'.join(name)!r} has {len(spec)} entries, {tuple(spec)}, but the "
            f"array's shape is {shape}."
        )
    for entry, dim in zip(spec, shape, strict=False):
        if dim % _n_parts(entry, sizes):
            raise LayoutError(
                f"The rule for {'/'.join(name)!r} of shape {shape} splits {dim} into "
                f"{_n_parts(entry, sizes)} parts over {entry!r}, which does not divide. Choose "
                "another size, another rule, or give the name of one axis alone as the rule: it "
                "then splits what divides."
            )
    return spec


def _axes(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _n_parts(entry: Entry, sizes: Sizes) -> int:
    return math.prod(sizes[axis] for axis in _axes(entry))


def n_parts(spec: jax.P, sizes: Sizes) -> int:
    """Into how many parts a spec splits an array.

    >>> n_parts(jax.P('data', None, ('fsdp', 'model')), {'data': 2, 'fsdp': 3, 'model': 4})
    24
    """
    return math.prod(_n_parts(entry, sizes) for entry in spec)


def _trimmed(entries: Iterable[Entry]) -> jax.P:
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return jax.P(*kept)
