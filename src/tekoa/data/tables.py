"""Columns of .csv and .parquet files, read by pyarrow into memory."""

from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data import files
from tekoa.data.arrays import ArrayReader
from tekoa.data.reader import DataError


def read_csv(path: str) -> ArrayReader:
    """Reads a .csv file with a header line; each column becomes a field.

    Raises:
        DataError: If a row has more or fewer fields than the header; it names the row.
    """
    csv = files.require("pyarrow.csv", "tables", f"Reading {path}")
    pyarrow = files.require("pyarrow", "tables", f"Reading {path}")
    files.check_readable(path)
    wrong: list[Any] = []

    def note(row: Any) -> str:
        wrong.append(row)
        return "error"

    # Rows are numbered only if they are read one block after the other.
    reading = csv.ReadOptions(use_threads=False)
    parsing = csv.ParseOptions(invalid_row_handler=note)
    try:
        table = csv.read_csv(path, read_options=reading, parse_options=parsing)
    except (pyarrow.ArrowInvalid, OSError) as error:
        if wrong:
            row = wrong[0]
            raise DataError(
                f"{path}, row {row.number}: {row.actual_columns} fields where the header has "
                f"{row.expected_columns}: {row.text[:60]!r}."
            ) from None
        raise DataError(f"{path} cannot be read as csv: {error}.") from None
    for name in table.column_names:
        if pyarrow.types.is_binary(table.schema.field(name).type):
            raise _bad_text(table.column(name), name, path)
    return _table_reader(table, path)


def _bad_text(column: Any, name: str, path: str) -> DataError:
    """Finds the row for which pyarrow made a column one of bytes."""
    for at, value in enumerate(column.to_pylist(), start=2):
        try:
            (value or b"").decode("utf-8")
        except UnicodeDecodeError:
            return DataError(f"{path}, row {at}, column {name!r}: {value[:40]!r} is no UTF-8.")
    return DataError(f"{path}, column {name!r} is no text.")


def read_parquet(path: str) -> ArrayReader:
    """Reads a .parquet file; each column becomes a field."""
    parquet = files.require("pyarrow.parquet", "tables", f"Reading {path}")
    pyarrow = files.require("pyarrow", "tables", f"Reading {path}")
    files.check_readable(path)
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}.") from None
    return _table_reader(table, path)


def _table_reader(table: Any, path: str) -> ArrayReader:
    if table.num_rows == 0:
        raise DataError(f"{path} has the columns {table.column_names}, but no row.")
    fields = {name: _column(table.column(name), name, path) for name in table.column_names}
    return ArrayReader(fields, Path(path).name)


def _column(column: Any, name: str, path: str) -> np.ndarray:
    """Makes an array of a column: numbers as they are, lists of one length as rows."""
    if column.null_count:
        at = next(i for i, value in enumerate(column) if not value.is_valid)
        raise DataError(
            f"{path}, column {name!r}: row {at + 1} has no value ({column.null_count} in all). "
            "Fill or drop them first."
        )
    values = column.to_numpy()
    if values.dtype != object or not isinstance(values[0], (np.ndarray, list)):
        return values
    lengths = {len(value) for value in values}
    if len(lengths) > 1:
        raise DataError(
            f"{path}, column {name!r} holds lists of different lengths ({min(lengths)} to "
            f"{max(lengths)}). Pad them to one length first."
        )
    return np.stack(values)
