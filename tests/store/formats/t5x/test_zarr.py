"""The zarr side of T5X: chunk shapes, specs, and checks before anything is opened."""

import json

import ml_dtypes
import numpy as np
import pytest

from tekoa.store import errors
from tekoa.store.formats.t5x import zarr


def test_chunk_shapes_are_those_of_t5x(golden):
    for shape, target, expected in json.loads((golden / "choose_chunk_shape.json").read_text())[
        "rows"
    ]:
        if expected == "ERROR IndexError":
            with pytest.raises(IndexError):
                zarr.choose_chunk_shape(tuple(shape), target)
        else:
            assert list(zarr.choose_chunk_shape(tuple(shape), target)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float16"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_arrays_are_read_back(tmp_path, dtype, shape):
    array = np.ones(shape, getattr(ml_dtypes, dtype, dtype))
    spec = zarr.make_spec("target.x", array)
    [future.result() for future in zarr.write(tmp_path, spec, array, is_writer=True)]
    assert (tmp_path / "target.x" / ("0" if len(shape) < 2 else "0.0")).exists()
    read = zarr.open_array(tmp_path, zarr.parse_spec(spec, "x")).read().result()
    assert read.dtype == array.dtype
    assert np.array_equal(read, array)


def test_large_arrays_are_split_and_zeros_are_written_too(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr, "_TARGET_BYTES", 40)
    array = np.zeros((6, 4), np.float32)
    spec = zarr.make_spec("x", array)
    assert spec["metadata"]["chunks"] == [3, 2]
    [future.result() for future in zarr.write(tmp_path, spec, array, is_writer=True)]
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        ".zarray", "0.0", "0.1", "1.0", "1.1"
    ]  # fmt: skip


def test_a_missing_chunk_is_damage_and_not_zeros(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr, "_TARGET_BYTES", 40)
    array = np.ones((6, 4), np.float32)
    spec = zarr.make_spec("x", array)
    [future.result() for future in zarr.write(tmp_path, spec, array, is_writer=True)]
    (tmp_path / "x" / "1.0").unlink()
    with pytest.raises(errors.DamagedError, match="1 of 4 chunk files are missing"):
        zarr.open_array(tmp_path, zarr.parse_spec(spec, "x"))


def test_older_forms_of_specs_are_accepted():
    spec = zarr.make_spec("x", np.ones(2, np.float32))
    gcs = {**spec, "kvstore": {"driver": "gcs", "bucket": "t5x-dummy-bucket", "path": "x/"}}
    top = {**spec, "kvstore": {"driver": "gfile"}, "path": "x"}
    inner = {**spec, "metadata": {**spec["metadata"], "dtype": "<f4"}}
    del inner["dtype"]
    expected = zarr.Spec(path="x", shape=(2,), dtype="float32")
    assert [zarr.parse_spec(form, "x") for form in (spec, gcs, top, inner)] == [expected] * 4


def test_partial_chunks_at_the_edge_are_read(tmp_path):
    import tensorstore as ts

    spec = {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"},
        "metadata": {"shape": [5], "chunks": [3], "compressor": {"id": "zstd", "level": 1}},
    }
    ts.open(spec, create=True).result().write(np.arange(5, dtype=np.float32)).result()
    array = zarr.open_array(tmp_path, zarr.Spec(path="x", shape=(5,), dtype="float32"))
    assert array.read().result().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"kvstore": {"driver": "http", "path": "x/"}},
        {"kvstore": {"driver": "file", "path": "/etc/"}},
        {"kvstore": {"driver": "file", "path": "a/../../x/"}},
        {"kvstore": {"driver": "file", "path": 3}},
        {"kvstore": {"driver": "file"}},
        {"driver": "n5"},
    ],
)
def test_unsafe_specs_are_refused(change):
    spec = {**zarr.make_spec("x", np.ones(2, np.float32)), **change}
    with pytest.raises(errors.UnsafeError):
        zarr.parse_spec(spec, "leaf 'a'")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "uint16"},
        {"dtype": "object"},
        {"dtype": None},
        {"metadata": {"shape": [-1]}},
        {"metadata": {"shape": "x"}},
        {"metadata": {}},
        {"metadata": 3},
    ],
)
def test_malformed_specs_are_damage(change):
    spec = {**zarr.make_spec("x", np.ones(2, np.float32)), **change}
    with pytest.raises(errors.DamagedError):
        zarr.parse_spec(spec, "leaf 'a'")
