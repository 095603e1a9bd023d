"""The examples of a run: every row once, and the rows of each batch."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from tekoa.estimator.cli.flags import UsageError

_MAX_BYTES = 2 * 10**9
_ORDER = "order"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """The examples of the first steps of a run.

    Attributes:
        names: The names of the fields; numbers for batches that are tuples.
        rows: Each field of all different rows.
        order: The rows of each batch, of shape (steps, rows in a batch).
        kind: Whether a batch is a dict, a tuple or an array.
    """

    names: tuple[str, ...]
    rows: tuple[np.ndarray, ...]
    order: np.ndarray
    kind: type

    def save(self, path: pathlib.Path) -> None:
        """Writes an .npz file."""
        fields: dict[str, Any] = dict(zip(self.names, self.rows, strict=True))
        fields[_ORDER] = self.order
        with open(path, "wb") as file:
            np.savez(file, **fields)

    def code(self) -> str:
        """Returns the lines that read the file, and define `batch_of(step)`."""
        batch = {
            dict: "{name: rows[ORDER[step]] for name, rows in ROWS.items()}",
            tuple: "tuple(rows[ORDER[step]] for rows in ROWS.values())",
            np.ndarray: 'ROWS["x"][ORDER[step]]',
        }[self.kind]
        return f'''ROWS = dict(np.load(pathlib.Path(__file__).with_suffix(".npz")))
ORDER = ROWS.pop("{_ORDER}")  # The rows of each batch.


def batch_of(step):
    return {batch}'''


def read(batches: Iterable[Any], n_steps: int) -> Examples:
    """Reads the batches of the first steps.

    Raises:
        UsageError: If they are too large for a file, or are not made of arrays.
    """
    positions: dict[bytes, int] = {}
    rows: list[tuple[np.ndarray, ...]] = []
    order, names, kind, n_bytes = [], (), dict, 0
    for _, batch in zip(range(n_steps), batches, strict=False):
        names, fields, kind = _fields(batch)
        order.append([])
        for row in zip(*fields, strict=True):
            key = hashlib.blake2b(b"".join(x.tobytes() for x in row), digest_size=16).digest()
            if key not in positions:
                positions[key] = len(rows)
                rows.append(row)
                n_bytes += sum(x.nbytes for x in row)
            order[-1].append(positions[key])
        if n_bytes > _MAX_BYTES:
            raise UsageError(
                f"The examples of {n_steps} steps take more than {_MAX_BYTES / 1e9:g} GB. Use "
                f"--steps=N, with fewer than {len(order)} steps."
            )
    if len({len(batch) for batch in order}) > 1:
        raise UsageError("The batches of this run differ in size, so that it cannot be ejected.")
    columns = tuple(np.stack(column) for column in zip(*rows, strict=True))
    return Examples(names=names, rows=columns, order=np.array(order, np.int32), kind=kind)


def _fields(batch: Any) -> tuple[tuple[str, ...], list[np.ndarray], type]:
    """Returns names and arrays of a batch, and whether it is a dict, a tuple or an array."""
    if isinstance(batch, dict):
        names, values, kind = tuple(batch), list(batch.values()), dict
    elif isinstance(batch, (tuple, list)):
        names, values, kind = tuple(f"x{i}" for i in range(len(batch))), list(batch), tuple
    else:
        names, values, kind = ("x",), [batch], np.ndarray
    are_arrays = all(isinstance(x, (np.ndarray, jax.Array)) and x.ndim for x in values)
    if _ORDER in names or not are_arrays:
        raise UsageError(
            "Only batches that are arrays, or dicts or tuples of them, can be ejected."
        )
    return names, [np.asarray(value) for value in values], kind
