"""A table of what was loaded from a checkpoint, leaf by leaf."""

import dataclasses
from typing import Literal

Outcome = Literal[
    "loaded", "loaded in part", "missing", "unexpected", "other shape", "other dtype", "ambiguous"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The outcome for one leaf.

    Attributes:
        name: The name of the leaf, joined by '/'.
        outcome: 'missing' leaves are not in the checkpoint, 'unexpected' ones only there, and
            'ambiguous' ones match several different stored leaves.
        detail: Shapes and dtypes, or the name of the stored leaf.
    """

    name: str
    outcome: Outcome
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcomes for all leaves; prints as an aligned table.

    >>> print(Report([Row(name='w', outcome='loaded'), Row(name='b/c', outcome='missing')]))
    w    loaded
    b/c  missing
    """

    rows: list[Row]

    def names(self, *outcomes: Outcome) -> list[str]:
        """Returns the names of the leaves with one of these outcomes, in order."""
        return [row.name for row in self.rows if row.outcome in outcomes]

    def __str__(self) -> str:
        if not self.rows:
            return "(no leaves)"
        name_width = max(len(row.name) for row in self.rows)
        outcome_width = max(len(row.outcome) for row in self.rows)
        return "\n".join(
            f"{row.name:<{name_width}}  {row.outcome:<{outcome_width}}  {row.detail}".rstrip()
            for row in self.rows
        )
