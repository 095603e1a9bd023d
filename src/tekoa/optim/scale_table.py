"""The table of scales: one row per parameter, printable, ready for `amos`."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tekoa.core import trees


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """What the model says about one parameter."""

    name: trees.Name
    shape: tuple[int, ...]
    eta: float  # The scale expected of its entries.
    slot_shape: tuple[int, ...]  # Of the optimizer's slots: 1 where they are averaged.
    reason: str  # How eta was found.
    placed: bool = True  # Whether a rule gave eta, or the fallback.
    eta_by_slice: np.ndarray | None = None  # If the slices of a stack differ; broadcasts.


class ScaleTable:
    """Scales and slot shapes of all parameters of a model, in the tree's order.

    Iterates over its rows; `table['Dense_0/kernel']` is one of them. `eta_fn` and
    `shape_fn` are what `tekoa.optim.amos.amos` takes.

    >>> row = ScaleRow(name=('dense', 'kernel'), shape=(4, 2), eta=0.5, slot_shape=(1, 2),
    ...                reason='contracted over axes 0: 4 terms of rms 1')
    >>> print(ScaleTable([row]))
    name          shape   eta  slot    reason
    dense/kernel  (4, 2)  0.5  (1, 2)  contracted over axes 0: 4 terms of rms 1
    """

    def __init__(self, rows: list[ScaleRow]):
        self.rows = tuple(rows)
        self._by_name = {"/".join(row.name): row for row in rows}

    def __iter__(self) -> Iterator[ScaleRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str | trees.Name | int) -> ScaleRow:
        if isinstance(name, int):
            return self.rows[name]
        joined = name if isinstance(name, str) else "/".join(name)
        if joined not in self._by_name:
            near = difflib.get_close_matches(joined, self._by_name, 1, 0.0)
            raise KeyError(
                f"No scale was found for parameter {joined!r}; the nearest of {len(self)} is "
                f"{near[0] if near else None!r}. Read the scales off the same tree that the "
                "optimizer is given."
            )
        return self._by_name[joined]

    @property
    def unplaced(self) -> list[ScaleRow]:
        """The rows that no rule could place; their scale is the fallback."""
        return [row for row in self.rows if not row.placed]

    def eta_fn(self, name: trees.Name, shape: tuple[int, ...]) -> Any:
        """The scale of a parameter: a number, or an array where slices of it differ."""
        row = self._checked(name, shape)
        return row.eta if row.eta_by_slice is None else row.eta_by_slice

    def shape_fn(self, name: trees.Name, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a parameter's slots."""
        return self._checked(name, shape).slot_shape

    def _checked(self, name: trees.Name, shape: tuple[int, ...]) -> ScaleRow:
        row = self[tuple(name)]
        if tuple(shape) != row.shape:
            raise ValueError(
                f"Parameter {'/'.join(name)!r} has shape {tuple(shape)}, but its scale was "
                f"read off a model where it has {row.shape}. Call scales() on these parameters."
            )
        return row

    def __str__(self) -> str:
        lines = [("name", "shape", "eta", "slot", "reason")]
        for row in self.rows:
            reason = row.reason if row.placed else f"NOT PLACED: {row.reason}"
            cells = "/".join(row.name), str(row.shape), f"{row.eta:.3g}", str(row.slot_shape)
            lines.append((*cells, reason))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
            for line in lines
        )

    __repr__ = __str__
