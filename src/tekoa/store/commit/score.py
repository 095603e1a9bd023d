"""The best value of a metric so far, kept in a file beside the checkpoints.

The file holds one number as text. It is replaced atomically, and only after the checkpoint it
belongs to is committed: a program killed in between finds the older score and evaluates that
checkpoint again.
"""

import math
import operator
import os
import pathlib
from typing import Literal

from tekoa import hosts
from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import durable

Mode = Literal["min", "max"]

NAME = "score"
# How the names of directories with the best steps of a metric begin.
PREFIXES: dict[Mode, str] = {"max": "high_", "min": "low_"}
_MAX_BYTES = 2**12


class BestScore:
    """The best finite value of one metric over all runs of a program.

    Args:
        path: The file; it and its directory need not exist.
        mode: Whether lower ('min') or higher ('max') values are better.

    >>> import tempfile
    >>> score = BestScore(tempfile.mkdtemp() + '/score', mode='max')
    >>> score.is_better(0.0), score.record(0.0), score.is_better(math.nan), score.value
    (True, None, False, 0.0)
    """

    def __init__(self, path: str | os.PathLike[str], *, mode: Mode):
        check_mode(mode)
        self._path = files.local_path(path)
        self._better = operator.lt if mode == "min" else operator.gt
        self._value = read(self._path)

    @property
    def value(self) -> float | None:
        """The best value so far, or None."""
        return self._value

    def is_better(self, value: float) -> bool:
        """Returns whether `value` is finite and better than all previous values."""
        value = float(value)
        return math.isfinite(value) and (self._value is None or self._better(value, self._value))

    def record(self, value: float) -> None:
        """Stores `value` as the best; call it after the checkpoint is committed.

        Raises:
            ValueError: If it is not better.
        """
        if not self.is_better(value):
            raise ValueError(f"{value!r} is not better than {self._value!r} in {self._path}.")
        self.set(value)

    def set(self, value: float | None) -> None:
        """Stores a value whatever the one before, to match the checkpoints; None: no value."""
        if value == self._value:
            return
        self._value = None if value is None else float(value)
        if not hosts.current().is_writer:
            return
        if value is None:
            self._path.unlink(missing_ok=True)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self._path, repr(self._value).encode())


def check_mode(mode: str) -> None:
    """Raises `ValueError` if a mode is neither 'min' nor 'max'."""
    if mode not in PREFIXES:
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}.")


def read(path: pathlib.Path) -> float | None:
    """Returns the score in a file; None if there is no file, or its score is not finite.

    Raises:
        errors.DamagedError: If it is not a number.
    """
    try:
        value = float(files.read_bytes(path, max_bytes=_MAX_BYTES).decode())
    except FileNotFoundError:
        return None
    except PermissionError:
        raise  # This is no damage.
    except (OSError, ValueError) as error:
        raise errors.DamagedError(
            f"{path}: is not a number ({error}). Write the best score so far into this file, or "
            "delete it to start from scratch."
        ) from None
    return value if math.isfinite(value) else None
