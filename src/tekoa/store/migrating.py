"""An optimizer's state carried over into a changed chain of transformations.

A leaf is known by its transformation (the class of the innermost NamedTuple around
it), its field there, and the parameter's path below. What matches is copied, the rest
stays as initialised; it is never done without a table that says so.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tekoa.core import trees
from tekoa.store import leaves, report, steps, warmstart

ITEM = "optimizer_state"
# Transformation, then field and parameter path.
Key = tuple[str, trees.Name]
Names = list[trees.Name]


def migrate(target: trees.PyTree, source: steps.OpenStep) -> tuple[trees.PyTree, report.Report]:
    """Copies the parts of a stored optimizer state that a new one has too.

    Args:
        target: The new optimizer's state, as initialised.
        source: The step to copy from, such as `loading.open_newest(path)`.

    Returns:
        The new state, and a table of what was copied ('taken'), stays as initialised
        ('missing', 'other shape', 'other dtype', 'ambiguous') or is not needed any
        more ('unexpected').
    """
    index = source.index
    stored = {name: leaf for name, leaf in index.leaves.items() if name[0] == ITEM}
    values = source.read(stored, {})
    new = _by_key(leaves.flatten({ITEM: target}), leaves.node_classes({ITEM: target}))
    old = _by_key(stored, index.nodes) if index.nodes else _by_suffix(stored, new)
    origins = {
        name: _origins(i, new[key], old.get(key, []), values)
        for key in new
        for i, name in enumerate(new[key])
    }
    rows: list[report.Row] = []

    def visit(name: trees.Name, leaf: Any) -> Any:
        found = origins[(ITEM, *name)]
        if len(found) > 1:
            where = ", ".join("/".join(each[1:]) for each in found)
            rows.append(report.Row(name="/".join(name), outcome="ambiguous", detail=where))
            return leaf
        value, row = warmstart.take(name, leaf, values[found[0]] if found else None)
        moved = f"from {'/'.join(found[0][1:])}" if found and found[0][1:] != name else ""
        detail = " ".join(filter(None, (row.detail, moved)))
        rows.append(report.Row(name=row.name, outcome=row.outcome, detail=detail))
        return value

    state = trees.map_named(visit, target)
    used = {name for found in origins.values() for name in found}
    for name in stored:
        if name not in used:
            rows.append(report.Row(name="/".join(name[1:]), outcome="unexpected"))
    return state, report.Report(rows)


def _by_key(names: Iterable[trees.Name], nodes: Mapping[trees.Name, str]) -> dict[Key, Names]:
    """Groups leaves by transformation, field and parameter path, in order."""
    groups: dict[Key, Names] = collections.defaultdict(list)
    for name in names:
        around = [n for n in range(1, len(name)) if name[:n] in nodes]
        cut = around[-1] if around else 1
        groups[nodes.get(name[:cut], ""), name[cut:]].append(name)
    return groups


def _by_suffix(names: Iterable[trees.Name], new: Mapping[Key, Names]) -> dict[Key, Names]:
    """Groups leaves of a checkpoint without class names, as T5X's, by the new keys."""
    bare: dict[trees.Name, Names] = collections.defaultdict(list)
    for name in names:
        parts = name[1:]
        while parts and parts[0].isdigit():
            parts = parts[1:]
        bare[parts].append(name)
    return {key: bare[key[1]] for key in new}


def _origins(i: int, new: Names, old: Names, values: Mapping[trees.Name, Any]) -> Names:
    """Gives the stored leaf for the i-th of the new leaves of a key; several if in doubt."""
    if len(new) == len(old):
        return [old[i]]
    first = old[:1]
    same = all(np.array_equal(values[name], values[first[0]]) for name in old)
    return first if same else old
