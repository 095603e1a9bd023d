"""Partition specs of arrays, from rules over names, from logical axes and from shapes.

The rules are described in `sharding.layout.Layout`.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from tekoa.core import rules, trees
from tekoa.sharding.mesh import LayoutError

_log = logging.getLogger("tekoa")

Entry = str | tuple[str, ...] | None
Rule = str | jax.P | Sequence[Entry]
Rules = Mapping[str, Rule]
LogicalRules = Sequence[tuple[str, Entry]]
Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Specs = dict[trees.Name, jax.P]


def check_rules(table: Rules, sizes: Sizes, what: str) -> None:
    """Raises if a rule names an axis twice, or one that the mesh does not have.

    Raises:
        LayoutError: With the rule and the axes of the mesh.
    """
    for pattern, rule in table.items():
        entries = (rule,) if isinstance(rule, str) else tuple(rule)
        used = [axis for entry in entries for axis in axes_of(entry)]
        if unknown := [axis for axis in used if axis not in sizes]:
            raise LayoutError(
                f"The rule {pattern!r} of {what} names the axis {unknown[0]!r}, but the mesh has "
                f"the axes {', '.join(map(repr, sizes))}."
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
    """Returns the spec of each array: from the first matching rule, else its logical axes.

    Args:
        shapes: Shape of each array by name.
        sizes: Sizes of the mesh's axes.
        table: Rules over names; a pattern may match anywhere in a name.
        logical: Logical axes of the arrays that have them, by name.
        logical_rules: Logical axis to mesh axis, as in T5X.

    Raises:
        LayoutError: If a rule does not fit an array that it matches.
    """
    compiled_rules = rules.compile_rules(table)
    specs: Specs = {}
    for name, shape in shapes.items():
        spec = jax.P()
        if name in logical:
            requested = from_logical(logical[name], logical_rules, sizes)
            spec = drop_uneven(requested, shape, sizes)
            if spec != _trim(requested):
                _log.warning(
                    "%s of shape %s cannot be split evenly by %s; it is split by %s.",
                    "/".join(name), shape, tuple(requested), tuple(spec),
                )  # fmt: skip
        rule = rules.first_match(compiled_rules, name)
        if isinstance(rule, str):
            spec = split_largest(spec, shape, rule, sizes)
        elif rule is not None:
            spec = jax.P(*rule)
            _check_fits(spec, name, shape, sizes)
        specs[name] = spec
    return specs


def from_logical(names: Sequence[Any], logical_rules: LogicalRules, sizes: Sizes) -> jax.P:
    """Converts logical axes to mesh axes.

    Earlier rules come first; a mesh axis is used once per array. A name without a rule that
    is itself a mesh axis means that axis.

    >>> from_logical(('embed', 'mlp'), (('mlp', 'model'), ('embed', 'model')), {'model': 2})
    P(None, 'model')
    """
    entries: list[Entry] = [None] * len(names)
    is_unset = [isinstance(name, str) for name in names]
    mesh_axes = [(name, name) for name in names if name in sizes]
    for logical, entry in [*logical_rules, *mesh_axes]:
        used = _used_axes(entries)
        for i, name in enumerate(names):
            if name == logical and is_unset[i] and not used & set(axes_of(entry)):
                entries[i], is_unset[i] = entry, False
                break
    return jax.P(*entries)


def drop_uneven(spec: jax.P, shape: Shape, sizes: Sizes) -> jax.P:
    """Removes the entries of a spec that do not split their dimension evenly.

    >>> drop_uneven(jax.P('data', 'model'), (3, 8), {'data': 2, 'model': 4})
    P(None, 'model')
    """
    return _trim(
        entry if dim % _n_parts(entry, sizes) == 0 else None
        for entry, dim in zip(spec, shape, strict=False)
    )


def split_largest(spec: jax.P, shape: Shape, axis: str, sizes: Sizes) -> jax.P:
    """Splits the largest dimension that can be split evenly over one more axis.

    >>> split_largest(jax.P(None, 'model'), (16, 64), 'data', {'data': 8, 'model': 4})
    P('data', 'model')
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    if sizes[axis] == 1 or axis in _used_axes(entries):
        return spec
    local = [dim // _n_parts(entry, sizes) for entry, dim in zip(entries, shape, strict=True)]
    # Dimensions that are not split yet come first.
    order = sorted(range(len(shape)), key=lambda i: (entries[i] is not None, -local[i], i))
    for i in order:
        if local[i] and local[i] % sizes[axis] == 0:
            entries[i] = axis if entries[i] is None else (*axes_of(entries[i]), axis)
            break
    return _trim(entries)


def slot_specs(
    slots: Mapping[trees.Name, Shape],
    params: Mapping[trees.Name, Shape],
    param_specs: Mapping[trees.Name, jax.P],
    sizes: Sizes,
    *,
    table: Rules,
) -> Specs:
    """Returns the spec of each array of an optimizer's state.

    A slot is split like its parameter, which is the one whose name ends the slot's name, else
    like the parameters of its shape if they agree. Dimensions that a slot lacks, or that have
    size 1, are not split.

    Args:
        slots: Shape of each array of the optimizer's state by name.
        params: Shapes of the parameters.
        param_specs: Specs of the parameters.
        sizes: Sizes of the mesh's axes.
        table: Rules over the names of slots; dimensions that cannot be split evenly are not.
    """
    compiled_rules = rules.compile_rules(table)
    by_shape: dict[Shape, set[jax.P]] = {}
    for name, shape in params.items():
        by_shape.setdefault(shape, set()).add(param_specs[name])
    specs: Specs = {}
    for name, shape in slots.items():
        owner = next((name[i:] for i in range(len(name)) if name[i:] in params), None)
        candidates = by_shape.get(shape, set())
        spec = next(iter(candidates)) if len(candidates) == 1 else jax.P()
        if owner is not None:
            spec = _align(param_specs[owner], params[owner], shape, sizes)
        rule = rules.first_match(compiled_rules, name)
        if isinstance(rule, str):
            spec = split_largest(spec, shape, rule, sizes)
        elif rule is not None:
            spec = drop_uneven(jax.P(*rule), shape, sizes)
        specs[name] = spec
    return specs


def _align(spec: jax.P, shape: Shape, slot: Shape, sizes: Sizes) -> jax.P:
    """Returns the spec of a slot with the last dimensions of its parameter, or the first."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    extra = len(slot) - len(shape)
    if extra > 0:
        return drop_uneven(jax.P(*[None] * extra, *entries), slot, sizes)
    last_dims, first_dims = range(-extra, len(shape)), range(len(slot))
    for dims in (last_dims, first_dims):
        if all(n in (1, shape[i]) for n, i in zip(slot, dims, strict=True)):
            return _trim(None if n == 1 else entries[i] for n, i in zip(slot, dims, strict=True))
    return jax.P()


def _check_fits(spec: jax.P, name: trees.Name, shape: Shape, sizes: Sizes) -> None:
    if len(spec) > len(shape):
        raise LayoutError(
            f"The rule for {'/'.join(name)!r} has {len(spec)} entries, {tuple(spec)}, but the "
            f"array's shape is {shape}."
        )
    for entry, dim in zip(spec, shape, strict=False):
        if dim % (n := _n_parts(entry, sizes)):
            raise LayoutError(
                f"The rule for {'/'.join(name)!r} of shape {shape} splits {dim} into {n} "
                f"parts over {entry!r}, which are not equal. Choose another size or another rule; "
                "a rule that is the name of one axis splits only divisible dimensions."
            )


def axes_of(entry: Entry) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec.

    >>> axes_of(None), axes_of('data'), axes_of(('data', 'fsdp'))
    ((), ('data',), ('data', 'fsdp'))
    """
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _used_axes(entries: Iterable[Entry]) -> set[str]:
    return {axis for entry in entries for axis in axes_of(entry)}


def _n_parts(entry: Entry, sizes: Sizes) -> int:
    return math.prod(sizes[axis] for axis in axes_of(entry))


def n_parts(spec: jax.P, sizes: Sizes) -> int:
    """Returns the number of parts into which a spec splits an array.

    >>> n_parts(jax.P('data', None, ('fsdp', 'model')), {'data': 2, 'fsdp': 3, 'model': 4})
    24
    """
    return math.prod(_n_parts(entry, sizes) for entry in spec)


def _trim(entries: Iterable[Entry]) -> jax.P:
    trimmed = list(entries)
    while trimmed and trimmed[-1] is None:
        trimmed.pop()
    return jax.P(*trimmed)
