"""What a sweep must remember besides its runs: which lanes were stopped, and why."""

import dataclasses
import json
import pathlib
from typing import Any

from tekoa.core import files
from tekoa.estimator.cli.flags import UsageError
from tekoa.store.commit import durable

FILE_NAME = "sweep.json"
_MAX_BYTES = 10**7


@dataclasses.dataclass(kw_only=True)
class SweepRecord:
    """The decisions of a sweep, stored in its directory.

    Attributes:
        directory: The directory of the sweep.
        stopped: Why a lane was stopped, by its name.
        halved: Steps at which half of the lanes were stopped, in this round.
        rounds: The values of the runs of each round that is complete, if there are rounds.
    """

    directory: pathlib.Path
    stopped: dict[str, str] = dataclasses.field(default_factory=dict)
    halved: list[int] = dataclasses.field(default_factory=list)
    rounds: list[list[dict[str, str]]] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, directory: pathlib.Path) -> "SweepRecord":
        """Reads the record of an earlier start; it is empty if there is none.

        Raises:
            UsageError: If the file is damaged.
        """
        path = directory / FILE_NAME
        if not path.exists():
            return cls(directory=directory)
        try:
            fields: dict[str, Any] = files.read_json(path, max_bytes=_MAX_BYTES)
            stopped, halved = fields["stopped"], fields["halved"]
            rounds = fields.get("rounds", [])
            if not isinstance(stopped, dict) or not isinstance(halved, list):
                raise ValueError("stopped must be an object and halved a list")
            if not isinstance(rounds, list) or not all(isinstance(r, list) for r in rounds):
                raise ValueError("rounds must be a list of lists")
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"{path} is damaged ({error}). Remove it: lanes that were stopped train again."
            ) from None
        return cls(directory=directory, stopped=stopped, halved=halved, rounds=rounds)

    def remove_leftovers(self) -> None:
        """Removes what a process that was killed in `write` left; see `durable.replace`."""
        for path in self.directory.glob(f".{FILE_NAME}.{'[0-9a-f]' * 32}"):
            path.unlink(missing_ok=True)

    def write(self) -> None:
        """Replaces the file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        fields: dict[str, Any] = {"stopped": self.stopped, "halved": self.halved}
        if self.rounds:
            fields["rounds"] = self.rounds
        durable.replace(self.directory / FILE_NAME, json.dumps(fields, indent=2).encode())


def rungs(n_lanes: int, n_steps: int, every: int) -> dict[int, int]:
    """Returns how many lanes go on after which steps, if half of them are stopped each time.

    Args:
        n_lanes: Lanes at the start.
        n_steps: Steps of a complete run.
        every: Steps between two checks; decisions fall on these.

    >>> rungs(8, 800, 50)
    {100: 4, 200: 2, 400: 1}
    """
    n_halvings = (n_lanes - 1).bit_length()
    decisions = {}
    for k in range(n_halvings):
        step = -(-n_steps // (2 ** (n_halvings - k) * every)) * every
        if 0 < step < n_steps:
            decisions[step] = max(1, n_lanes >> (k + 1))
    return decisions
