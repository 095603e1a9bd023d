"""A table of what was taken over from a checkpoint, leaf by leaf."""

import dataclasses
from typing import Literal

Outcome = Literal[
    "taken", "taken in part", "missing", "unexpected", "other shape", "other dtype", "ambiguous"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one leaf.

    Attributes:
        name: The leaf, parts joined by '/'.
        outcome: 'missing' leaves are not in the checkpoint, 'unexpected' ones only
            there; 'ambiguous' ones have several different originals.
        detail: Shapes and dtypes, or where it came from.
    """

    name: str
    outcome: Outcome
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """All rows; prints as an aligned table.

    >>> print(Report([Row(name='w', outcome='taken'), Row(name='b/c', outcome='missing')]))
    w    taken
    b/c  missing
    """

    rows: list[Row]

    def names(self, *outcomes: Outcome) -> list[str]:
        """Gives the leaves with one of these outcomes, in order."""
        return [row.name for row in self.rows if row.outcome in outcomes]

    def __str__(self) -> str:
        if not self.rows:
            return "(no leaves)"
        name = max(len(row.name) for row in self.rows)
        outcome = max(len(row.outcome) for row in self.rows)
        return "\n".join(
            f"{row.name:<{name}}  {row.outcome:<{outcome}}  {row.detail}".rstrip()
            for row in self.rows
        )
