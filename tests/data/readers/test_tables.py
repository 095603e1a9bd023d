import gzip

import numpy as np
import pytest

from tekoa import data

pa = pytest.importorskip("pyarrow", reason="the 'tables' extra is not installed")


def write_parquet(path, columns):
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path)


def test_csv_columns_become_fields(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,label,name\n1.5,0,anna\n2.5,2,ben\n")
    source = data.load(str(path))
    assert source.info.n_classes == 3
    batch = next(source.batches(2))
    assert batch["x"].tolist() == [1.5, 2.5]
    assert batch["label"].tolist() == [0, 2]
    assert batch["name"].tolist() == ["anna", "ben"]


def test_several_csv_files_form_one_source(tmp_path):
    for at in range(3):
        (tmp_path / f"{at}.csv").write_text(f"x\n{10 * at}\n{10 * at + 1}\n")
    source = data.load(f"{tmp_path}/*.csv")
    assert [int(example["x"]) for example in source] == [0, 1, 10, 11, 20, 21]


def test_compressed_csv_is_read(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x\n1\n2\n"))
    assert len(data.load(f"{tmp_path}/a.csv.gz")) == 2


@pytest.mark.parametrize(
    ("row", "n_fields"), [("1", 1), ("1,2,3", 3)], ids=["too short", "too long"]
)
def test_ragged_csv_names_the_row(tmp_path, row, n_fields):
    path = tmp_path / "a.csv"
    path.write_text(f"x,y\n1,2\n3,4\n{row}\n5,6\n")
    message = rf"a\.csv, row 4: {n_fields} fields where the header has 2: '{row}'"
    with pytest.raises(data.DataError, match=message):
        data.load(str(path))


def test_missing_values_name_column_and_row(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,\n")
    with pytest.raises(data.DataError, match=r"a\.csv, column 'y': row 3 has no value"):
        data.load(f"{tmp_path}/a.csv")


@pytest.mark.parametrize("row", ["1;2", "1,5;2,5"], ids=["one-column", "ragged"])
def test_another_separator_is_named(tmp_path, row):
    (tmp_path / "a.csv").write_text(f"x;y\n{row}\n")
    with pytest.raises(data.DataError, match=r"a\.csv separates its columns by ';'"):
        data.load(f"{tmp_path}/a.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"x,y\n", "but no rows"),
        (b"x\n1\n\xff\n", "row 3.*not UTF-8"),
        (b"1,2,1\n3,4,5\n", "'1'.*first row of a CSV file has the names"),
    ],
)
def test_csv_without_valid_data_raises(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(data.DataError, match=rf"a\.csv.*{message}"):
        data.load(f"{tmp_path}/a.csv")


def test_parquet_keeps_types(tmp_path):
    columns = {
        "x": pa.array(np.arange(4, dtype=np.uint8)),
        "rows": pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32())),
        "text": ["a", "b", "c", "d"],
    }
    write_parquet(tmp_path / "a.parquet", columns)
    source = data.load(f"{tmp_path}/a.parquet")
    assert source.info.dtypes["x"] == np.uint8
    assert source.info.dtypes["rows"] == np.float32
    assert source.info.shapes == {"x": (), "rows": (2,), "text": ()}
    assert source[3]["text"] == "d"


def test_lists_of_different_lengths_raise(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"x": [[1], [1, 2]]})
    with pytest.raises(data.DataError, match=r"column 'x' has lists of different lengths"):
        data.load(f"{tmp_path}/a.parquet")


def test_invalid_parquet_raises(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 something else")
    with pytest.raises(data.DataError, match=r"Cannot read .*a\.parquet as parquet"):
        data.load(f"{tmp_path}/a.parquet")
