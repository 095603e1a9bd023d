"""The table of scales: one row per parameter, printable, with the functions `amos` needs."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tekoa.core import messages, trees
from tekoa.optim.scales.roles import UNKNOWN, Role


class UnknownParameterError(LookupError):
    """A scale table has no row for a parameter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """The scale of one parameter."""

    name: trees.Name
    shape: tuple[int, ...]
    eta: float  # The expected scale of its entries.
    slot_shape: tuple[int, ...]  # Of the optimizer's slots: 1 along averaged axes.
    reason: str  # Why eta has this value.
    role: Role = UNKNOWN  # What the parameter does in the model.
    placed: bool = True  # Whether eta comes from a rule; otherwise it is the fallback.
    eta_by_slice: np.ndarray | None = None  # If slices differ; broadcasts to the parameter.
    depth: int = 0  # Kernels on the longest path from the data up to and with this one.
    n_branches: int = 1  # The residual branches of the model, if it is the end of one.
    in_branch: bool = False  # Whether it is part of a residual branch.


class ScaleTable:
    """Scales and slot shapes of all parameters of a model, in the tree's order.

    Iterates over its rows; `table['Dense_0/kernel']` is one row. `eta_fn` and `shape_fn` are
    arguments of `amos`.

    >>> row = ScaleRow(name=('dense', 'kernel'), shape=(4, 2), eta=0.5, slot_shape=(1, 2),
    ...                role=Role(kind='contracted', contracted=(0,), free=(1,)),
    ...                reason='contracted over axes 0: 4 terms of rms 1')
    >>> print(ScaleTable([row]))
    name          shape   eta  slot    role       reason
    dense/kernel  (4, 2)  0.5  (1, 2)  cf hidden  contracted over axes 0: 4 terms of rms 1
    """

    def __init__(self, rows: Sequence[ScaleRow], *, depth: int | None = None):
        """Creates a table; `depth` is that of the model if the rows are a part of it."""
        self.rows = tuple(rows)
        # The number of kernels on the longest path through the model.
        self.depth = max((row.depth for row in rows), default=0) if depth is None else depth
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
            raise UnknownParameterError(
                f"The scale table has no parameter {joined!r}."
                f"{messages.did_you_mean(joined, self._by_name)} It has "
                f"{messages.some_of(self._by_name)}. Find the scales of the same tree that the "
                "optimizer is initialised with."
            )
        return self._by_name[joined]

    @property
    def unplaced(self) -> list[ScaleRow]:
        """The rows whose scale is the fallback because no rule applied."""
        return [row for row in self.rows if not row.placed]

    @property
    def roles(self) -> dict[str, Role]:
        """The role of every parameter, by its joined name."""
        return {name: row.role for name, row in self._by_name.items()}

    @property
    def etas(self) -> dict[str, Any]:
        """The scales as JSON values: a number per parameter, or nested lists if slices differ."""
        return {
            name: row.eta if row.eta_by_slice is None else row.eta_by_slice.tolist()
            for name, row in self._by_name.items()
        }

    def with_etas(self, etas: Mapping[str, Any]) -> "ScaleTable":
        """Returns the same table with scales from `etas`, where it has them."""

        def replaced(name: str, row: ScaleRow) -> ScaleRow:
            value = etas.get(name)
            if value is None:
                return row
            if not isinstance(value, list):
                return dataclasses.replace(row, eta=value, eta_by_slice=None)
            by_slice = np.asarray(value)
            eta = float(np.exp(np.mean(np.log(by_slice))))
            return dataclasses.replace(row, eta=eta, eta_by_slice=by_slice)

        rows = [replaced(name, row) for name, row in self._by_name.items()]
        return ScaleTable(rows, depth=self.depth)

    def eta_fn(self, name: trees.Name, shape: tuple[int, ...]) -> Any:
        """Returns the scale of a parameter: a number, or an array if its slices differ."""
        row = self.row(name, shape)
        return row.eta if row.eta_by_slice is None else row.eta_by_slice

    def shape_fn(self, name: trees.Name, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter's slots."""
        return self.row(name, shape).slot_shape

    def row(self, name: trees.Name, shape: tuple[int, ...]) -> ScaleRow:
        """Returns the row of a parameter.

        Raises:
            UnknownParameterError: If the table has no such row.
            ValueError: If the parameter has another shape.
        """
        row = self[tuple(name)]
        if tuple(shape) != row.shape:
            raise ValueError(
                f"Parameter {'/'.join(name)!r} has shape {tuple(shape)}, but its scale was found "
                f"for shape {row.shape}. Find the scales of the model that is trained."
            )
        return row

    def __str__(self) -> str:
        lines = [("name", "shape", "eta", "slot", "role", "reason")]
        for row in self.rows:
            reason = row.reason if row.placed else f"NOT PLACED: {row.reason}"
            cells = "/".join(row.name), str(row.shape), f"{row.eta:.3g}", str(row.slot_shape)
            lines.append((*cells, str(row.role), reason))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
            for line in lines
        )

    __repr__ = __str__
