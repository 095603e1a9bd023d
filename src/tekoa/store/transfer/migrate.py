"""Copies a stored optimizer state into that of a changed chain of transformations.

A leaf is identified by its transformation (the class of the innermost NamedTuple around it),
its field there, and the parameter's path below. Leaves that match are copied, all others keep
their initial values; a table always reports which.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tekoa.core import trees
from tekoa.store.formats.leaves import flatten, node_classes
from tekoa.store.formats.step import OpenStep
from tekoa.store.transfer import report, warm_start

ITEM = "optimizer_state"
# Transformation, then field and parameter path.
Key = tuple[str, trees.Name]
Names = list[trees.Name]


def migrate(target: trees.PyTree, source: OpenStep) -> tuple[trees.PyTree, report.Report]:
    """Copies the parts of a stored optimizer state that a new one has too.

    Args:
        target: The initial state of the new optimizer.
        source: The step to copy from, such as `open_newest(path)`.

    Returns:
        The new state, and a table of the leaves that were copied ('loaded'), keep their
        initial value ('missing', 'other shape', 'other dtype', 'ambiguous') or are no longer
        needed ('unexpected').
    """
    index = source.index
    stored = {name: leaf for name, leaf in index.leaves.items() if name[0] == ITEM}
    values = source.read(stored, {})
    new = _by_key(flatten({ITEM: target}), node_classes({ITEM: target}))
    old = _by_key(stored, index.nodes) if index.nodes else _by_suffix(stored, new)
    origins = {
        name: _origins(i, new[key], old.get(key, []), values)
        for key in new
        for i, name in enumerate(new[key])
    }
    rows: list[report.Row] = []

    def visit(name: trees.Name, leaf: Any) -> Any:
        matches = origins[(ITEM, *name)]
        if len(matches) > 1:
            detail = ", ".join("/".join(match[1:]) for match in matches)
            rows.append(report.Row(name="/".join(name), outcome="ambiguous", detail=detail))
            return leaf
        value, row = warm_start.load_leaf(name, leaf, values[matches[0]] if matches else None)
        moved = f"from {'/'.join(matches[0][1:])}" if matches and matches[0][1:] != name else ""
        detail = " ".join(filter(None, (row.detail, moved)))
        rows.append(report.Row(name=row.name, outcome=row.outcome, detail=detail))
        return value

    state = trees.map_named(visit, target)
    used = {name for matches in origins.values() for name in matches}
    for name in stored:
        if name not in used:
            rows.append(report.Row(name="/".join(name[1:]), outcome="unexpected"))
    return state, report.Report(rows)


def _by_key(names: Iterable[trees.Name], nodes: Mapping[trees.Name, str]) -> dict[Key, Names]:
    """Groups leaves by transformation, field and parameter path, in order."""
    groups: dict[Key, Names] = collections.defaultdict(list)
    for name in names:
        lengths = [n for n in range(1, len(name)) if name[:n] in nodes]
        cut = lengths[-1] if lengths else 1
        groups[nodes.get(name[:cut], ""), name[cut:]].append(name)
    return groups


def _by_suffix(names: Iterable[trees.Name], new: Mapping[Key, Names]) -> dict[Key, Names]:
    """Groups the leaves of a checkpoint without class names, such as T5X's, by the new keys."""
    bare: dict[trees.Name, Names] = collections.defaultdict(list)
    for name in names:
        suffix = name[1:]
        while suffix and suffix[0].isdigit():
            suffix = suffix[1:]
        bare[suffix].append(name)
    return {key: bare[key[1]] for key in new}


def _origins(i: int, new: Names, old: Names, values: Mapping[trees.Name, Any]) -> Names:
    """Returns the stored leaf for the i-th new leaf of a key; several if it is ambiguous."""
    if len(new) == len(old):
        return [old[i]]
    are_equal = all(np.array_equal(values[name], values[old[0]]) for name in old)
    return old[:1] if are_equal else old
