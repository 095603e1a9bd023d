"""Numbers that change at given batches: the rows of a batch, the length of its sequences.

A training loop uses one batch per step, so batch i belongs to the step that follows i completed
ones, and a change at 1000 takes effect after 1000 steps.
"""

import bisect
import dataclasses
import itertools
import operator
import sys
from collections.abc import Mapping

# A number, or the number from each of several batches on: {0: 32, 1000: 64}.
Numbers = int | Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A number for every batch, constant from one change to the next.

    Attributes:
        starts: The batches at which it changes, increasing from 0.
        values: The number from each of them on.

    >>> rows = Schedule.of("batch_size", {0: 32, 1000: 64})
    >>> rows.at(999), rows.at(1000), rows.total(1001)
    (32, 64, 32064)
    """

    starts: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, name: str, numbers: Numbers) -> "Schedule":
        """Returns the schedule of a number, or of numbers by batch.

        Raises:
            TypeError: If they are no whole numbers.
            ValueError: If they are below 1, or there is none for batch 0.
        """
        table = numbers if isinstance(numbers, Mapping) else {0: numbers}
        try:
            pairs = sorted((operator.index(i), operator.index(n)) for i, n in table.items())
        except TypeError:
            raise TypeError(
                f"{name} must be a whole number, or whole numbers by step as in "
                f"{{0: 32, 1000: 64}}; got {numbers!r}."
            ) from None
        if not pairs or pairs[0][0] != 0:
            raise ValueError(
                f"{name} needs a number for step 0, as in {{0: 32, 1000: 64}} or 0:32,1000:64; got "
                f"{numbers!r}."
            )
        if (least := min(n for _, n in pairs)) < 1:
            raise ValueError(f"{name} must be at least 1, got {least}.")
        changes = [pairs[0], *(b for a, b in itertools.pairwise(pairs) if a[1] != b[1])]
        return cls(*(tuple(column) for column in zip(*changes, strict=True)))

    @property
    def is_constant(self) -> bool:
        """Whether it never changes."""
        return len(self.starts) == 1

    def at(self, i: int) -> int:
        """Returns the number of batch i."""
        return self.values[bisect.bisect_right(self.starts, i) - 1]

    def n_same(self, i: int) -> int:
        """Returns how many batches from i on have the same number."""
        later = bisect.bisect_right(self.starts, i)
        return self.starts[later] - i if later < len(self.starts) else sys.maxsize

    def total(self, i: int) -> int:
        """Returns the sum of the numbers of the batches before i."""
        ends = (*self.starts[1:], sys.maxsize)
        return sum(
            (min(end, i) - start) * value
            for start, end, value in zip(self.starts, ends, self.values, strict=True)
            if start < i
        )

    def n_within(self, total: int) -> int:
        """Returns how many batches have a sum of at most `total`."""
        # The last change that is reached, and what is left from there.
        at = bisect.bisect_right(self.starts, total, key=self.total) - 1
        return self.starts[at] + (total - self.total(self.starts[at])) // self.values[at]

    def before(self, i: int) -> "Schedule":
        """Returns the schedule without changes at batch i and later; the number of batch 0 stays.

        >>> Schedule.of("batch_size", {0: 32, 10: 64}).before(10)
        Schedule(starts=(0,), values=(32,))
        """
        n = max(1, bisect.bisect_left(self.starts, i))
        return Schedule(self.starts[:n], self.values[:n])

    def as_table(self) -> dict[int, int]:
        """Returns the numbers by the batch from which on they hold."""
        return dict(zip(self.starts, self.values, strict=True))

    def as_json(self) -> int | str:
        """Returns the number if it is constant, else text such as '0:32,1000:64'."""
        if self.is_constant:
            return self.values[0]
        return ",".join(f"{i}:{n}" for i, n in self.as_table().items())

    @classmethod
    def parse(cls, name: str, text: str | int) -> "Schedule":
        """Reads the result of `as_json`."""
        return cls.of(name, parse_table(name, str(text)))


def parse_table(name: str, text: str) -> dict[int, int]:
    """Reads pairs of step and number; a number without a step is that of step 0.

    Raises:
        ValueError: If the text has another form.

    >>> parse_table("batch_size", "32,1000:64")
    {0: 32, 1000: 64}
    """
    table: dict[int, int] = {}
    for part in text.split(","):
        start, _, number = part.rpartition(":")
        try:
            step, value = int(start or 0), int(number)
        except ValueError:
            raise ValueError(
                f"{name} is a number, or pairs of step and number such as 0:32,1000:64; got "
                f"{text!r}."
            ) from None
        if step in table:
            raise ValueError(f"{name} has two numbers for step {step}: {text!r}.")
        table[step] = value
    return table
