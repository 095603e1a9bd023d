"""The index of a step: everything about it except the arrays themselves.

It is stored as `tekoa.json`. The class names of NamedTuple nodes, such as optimizer states, are
stored too, so that the state of a changed optimizer chain can be matched later.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from tekoa.core import trees
from tekoa.store import errors
from tekoa.store.commit import paths
from tekoa.store.commit.identity import CommitId
from tekoa.store.formats import checked
from tekoa.store.formats.leaves import Leaf, Shardings, check_nesting, to_dtype

Read = Callable[[Mapping[trees.Name, Leaf], Shardings], dict[trees.Name, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """Everything known about a step without reading its arrays.

    Attributes:
        step: Completed optimizer steps.
        leaves: Descriptions of the leaves, by name.
        items: Names of all items, including those without leaves.
        meta: The JSON values stored with the step.
        metrics: The numbers that retention compares.
        nodes: Class names of NamedTuple nodes, by node name; empty if unknown.
    """

    step: int
    leaves: dict[trees.Name, Leaf]
    items: list[str]
    meta: dict[str, Any]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    nodes: dict[trees.Name, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenStep:
    """A step whose index has been read and whose arrays can be read.

    Attributes:
        index: The index, with Tekoa's item names.
        read: Reads leaves as numpy arrays, or as jax arrays if they have a sharding.
        commit: The identity of the step.
    """

    index: Index
    read: Read
    commit: CommitId


def write_index(directory: pathlib.Path, index: Index) -> None:
    """Writes the index of a step into its directory."""
    body = {
        "step": index.step,
        "items": index.items,
        "leaves": [
            [list(leaf.name), list(leaf.shape), leaf.dtype, leaf.kind, leaf.detail]
            for leaf in index.leaves.values()
        ],
        "nodes": [[list(name), kind] for name, kind in index.nodes.items()],
        "meta": index.meta,
        "metrics": index.metrics,
    }
    (directory / paths.INDEX).write_text(json.dumps(body))


def read_index(directory: pathlib.Path) -> Index:
    """Reads the index of a step.

    Raises:
        errors.DamagedError: If it is missing or unreadable.
    """
    fields = checked.read_index(directory)
    leaves = [Leaf(**leaf) for leaf in fields.pop("leaves")]
    try:
        for leaf in leaves:
            to_dtype(leaf.dtype)
        check_nesting({leaf.name: leaf for leaf in leaves})
    except ValueError as error:
        path = directory / paths.INDEX
        raise errors.DamagedError(f"{path}: the index is unreadable: {error!r}.") from error
    return Index(leaves={leaf.name: leaf for leaf in leaves}, **fields)
