"""More data to validate on, by name: the flag `--valid_sets`. Imports no JAX."""

import re
from typing import NamedTuple

from tekoa.estimator.cli.run_config import UsageError

_ENTRY = re.compile(r"([A-Za-z0-9_]+)(?::0*([1-9][0-9]{0,8}))?\s*=\s*(\S.*)")


class ValidSet(NamedTuple):
    """The pattern of the data, and the number of checks between two validations on it."""

    pattern: str
    every: int


def parse_sets(text: str | None) -> dict[str, ValidSet]:
    """Parses `--valid_sets`; empty if it is not set.

    Raises:
        UsageError: If an entry is malformed, or a name occurs twice.

    >>> parse_sets('noisy=a.csv,b.csv; seen:5=c.csv')['seen']
    ValidSet(pattern='c.csv', every=5)
    """
    sets: dict[str, ValidSet] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(";"))):
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise UsageError(
                "--valid_sets must be 'NAME=PATTERN; NAME:N=PATTERN; ...', where NAME has letters, "
                f"digits and _, and N is the number of checks between validations; got {part!r}."
            )
        name, every, pattern = match.groups()
        if name in sets:
            raise UsageError(f"--valid_sets has two sets with the name {name}. Rename one.")
        sets[name] = ValidSet(pattern, int(every or 1))
    return sets


def prefix(name: str) -> str:
    """Returns how the metrics of a set start; "" is the data of `--valid_pattern`.

    >>> prefix('noisy'), prefix('')
    ('valid_noisy_', 'valid_')
    """
    return f"valid_{name}_" if name else "valid_"
