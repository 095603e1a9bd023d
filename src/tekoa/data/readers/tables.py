"""Columns of .csv and .parquet files, read by pyarrow into memory."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.data.readers import files
from tekoa.data.readers.base import DataError
from tekoa.data.readers.memory import ArrayReader

# A handler of invalid rows would fail for rows that are not UTF-8.
_INVALID_ROW = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)


def read_csv(path: str) -> ArrayReader:
    """Reads a .csv file with a header line; each column becomes a field.

    Raises:
        DataError: If a row has more or fewer fields than the header.
    """
    csv = files.require("pyarrow.csv", "tables", f"Reading {path}")
    pyarrow = files.require("pyarrow", "tables", f"Reading {path}")
    files.check_readable(path)
    # pyarrow numbers the rows only without threads.
    read_options = csv.ReadOptions(use_threads=False)
    try:
        table = csv.read_csv(path, read_options=read_options)
        _check_names(table.column_names)
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        if row := _INVALID_ROW.search(str(error)):
            _check_separator(path)
            number, n_expected, n_fields, text = row.groups()
            raise DataError(
                f"{path}, row {number}: {n_fields} fields where the header has {n_expected}: "
                f"{text[:60]!r}. Correct or remove the row."
            ) from None
        raise DataError(f"Cannot read {path} as csv: {error}.") from None
    if table.num_columns == 1:
        _check_separator(path)
    for name in table.column_names:
        if pyarrow.types.is_binary(table.schema.field(name).type):
            raise _encoding_error(table.column(name), name, path)
    return _table_reader(table, path, first_row=2)


def _check_separator(path: str) -> None:
    """Raises an error if the header has no commas, but another character between its names."""
    with files.open_unpacked(path) as file:
        header = file.readline(10_000).decode("utf-8", "replace")
    for separator in ";\t|":
        if separator in header and "," not in header:
            raise DataError(
                f"{path} separates its columns by {separator!r}. Save it with commas, or pass "
                f"pandas.read_csv({path!r}, sep={separator!r}) as the data."
            )


def _encoding_error(column: Any, name: str, path: str) -> DataError:
    """Returns an error with the row that made pyarrow read a column as bytes."""
    for at, value in enumerate(column.to_pylist(), start=2):
        try:
            (value or b"").decode("utf-8")
        except UnicodeDecodeError:
            return DataError(
                f"{path}, row {at}, column {name!r}: {value[:40]!r} is not UTF-8. "
                "Save the file as UTF-8."
            )
    return DataError(f"{path}, column {name!r} is not text.")


def read_parquet(path: str) -> ArrayReader:
    """Reads a .parquet file; each column becomes a field."""
    parquet = files.require("pyarrow.parquet", "tables", f"Reading {path}")
    pyarrow = files.require("pyarrow", "tables", f"Reading {path}")
    files.check_readable(path)
    try:
        table = parquet.read_table(path)
        _check_names(table.column_names)
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(f"Cannot read {path} as parquet: {error}.") from None
    return _table_reader(table, path, first_row=1)


def _check_names(names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"several columns have the same name: {repeated}. The first row of a CSV file has the "
            "names of the columns"
        )


def _table_reader(table: Any, path: str, *, first_row: int) -> ArrayReader:
    if table.num_rows == 0:
        raise DataError(f"{path} has the columns {table.column_names}, but no rows.")
    fields = {
        name: _column(table.column(name), name, path, first_row) for name in table.column_names
    }
    return ArrayReader(fields, Path(path).name)


def _column(column: Any, name: str, path: str, first_row: int) -> np.ndarray:
    """Converts a column to an array; lists of equal length become a second axis."""
    if column.null_count:
        at = next(i for i, value in enumerate(column) if not value.is_valid)
        raise DataError(
            f"{path}, column {name!r}: row {at + first_row} has no value ({column.null_count} in "
            "all). Fill in the values, or drop the rows or the column; a pandas DataFrame can be "
            "the data too."
        )
    values = column.to_numpy()
    if values.dtype != object or not isinstance(values[0], (np.ndarray, list)):
        return values
    lengths = {np.shape(value) for value in values}
    if len(lengths) > 1:
        raise DataError(
            f"{path}, column {name!r} has lists of different lengths ({min(lengths)[0]} to "
            f"{max(lengths)[0]}). Pad them to the same length."
        )
    return np.stack(values)
