"""The msgpack side of T5X, against Flax's own serialization."""

import flax.serialization
import ml_dtypes
import msgpack
import numpy as np
import pytest

from tekoa.store import errors, t5x_msgpack

TREE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": {"c": np.array(3, np.int32), "d": np.ones(2, ml_dtypes.bfloat16)},
    "e": np.float32(2.5),
    "f": 1 + 2j,
    "g": 7,
    "h": "text",
    "i": None,
    "j": {},
    "k": np.arange(6.0).reshape(2, 3).T,
    "l": np.zeros((0, 4), np.uint8),
}


def test_bytes_are_those_of_flax():
    assert t5x_msgpack.pack(TREE) == flax.serialization.msgpack_serialize(TREE)


def test_flax_reads_ours_and_we_read_flax():
    ours = t5x_msgpack.unpack(flax.serialization.msgpack_serialize(TREE), "x")
    theirs = flax.serialization.msgpack_restore(t5x_msgpack.pack(TREE))
    for tree in (ours, theirs):
        for key in "abkl":
            np.testing.assert_equal(tree[key], TREE[key])
        assert tree["b"]["d"].dtype == ml_dtypes.bfloat16
        assert (tree["f"], tree["g"], tree["h"], tree["i"], tree["j"]) == (
            1 + 2j,
            7,
            "text",
            None,
            {},
        )


def test_chunked_arrays_are_joined(monkeypatch):
    monkeypatch.setattr(t5x_msgpack, "MAX_CHUNK_BYTES", 10)
    data = t5x_msgpack.pack(TREE)
    assert b"__msgpack_chunked_array__" in data
    np.testing.assert_equal(t5x_msgpack.unpack(data, "x")["a"], TREE["a"])


@pytest.mark.parametrize("n_bytes", [0, 1, 20, 60, 100])
def test_cut_files_are_damage(n_bytes):
    with pytest.raises(errors.DamagedError, match="somewhere"):
        t5x_msgpack.unpack(t5x_msgpack.pack(TREE)[:n_bytes], "somewhere")


@pytest.mark.parametrize(
    "payload",
    [
        msgpack.packb(([2**50], "float32", b"")),
        msgpack.packb(([-2, -2], "float32", b"\0" * 16)),
        msgpack.packb(([1], "object", b"\0" * 8)),
        msgpack.packb(([1], "void32", b"\0" * 4)),
        msgpack.packb(([1], "<f4", b"\0" * 4)),
        msgpack.packb((["1"], "float32", b"\0" * 4)),
        msgpack.packb((7, "float32", b"")),
        msgpack.packb("nothing"),
        b"",
    ],
)
def test_arrays_that_cannot_be_true_are_damage(payload):
    with pytest.raises(errors.DamagedError):
        t5x_msgpack.unpack(msgpack.packb({"a": msgpack.ExtType(1, payload)}), "x")


@pytest.mark.parametrize(
    "chunked",
    [
        {"shape": {"0": 2**40}, "chunks": {}},
        {"shape": {"1": 2}, "chunks": {"0": 1}},
        {"shape": 3, "chunks": {}},
        {},
    ],
)
def test_pieces_that_do_not_fit_are_damage(chunked):
    body = {"a": {"__msgpack_chunked_array__": True, **chunked}}
    with pytest.raises(errors.DamagedError):
        t5x_msgpack.unpack(msgpack.packb(body), "x")


def test_objects_are_not_packed():
    with pytest.raises(TypeError, match="cannot hold a set"):
        t5x_msgpack.pack({"a": {1, 2}})
