"""The msgpack file of T5X: Flax's bytes, and limits for hostile files."""

import flax.serialization
import ml_dtypes
import msgpack
import numpy as np
import pytest

from tekoa.store import errors
from tekoa.store.formats.t5x.msgpack import pack, unpack

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
    assert pack(TREE) == flax.serialization.msgpack_serialize(TREE)


def test_flax_reads_ours_and_we_read_flax():
    ours = unpack(flax.serialization.msgpack_serialize(TREE), "x")
    theirs = flax.serialization.msgpack_restore(pack(TREE))
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
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 10)
    data = pack(TREE)
    assert b"__msgpack_chunked_array__" in data
    np.testing.assert_equal(unpack(data, "x")["a"], TREE["a"])
    assert TREE["a"].shape == (2, 3)


@pytest.mark.parametrize("n_bytes", [0, 1, 20, 60, 100])
def test_truncated_files_are_damage(n_bytes):
    with pytest.raises(errors.DamagedError, match="somewhere"):
        unpack(pack(TREE)[:n_bytes], "somewhere")


@pytest.mark.parametrize(
    "payload",
    [
        msgpack.packb(([2**50], "float32", b"")),
        msgpack.packb(([-2, -2], "float32", b"\0" * 16)),
        msgpack.packb(([1], "object", b"\0" * 8)),
        msgpack.packb(([1], "void32", b"\0" * 4)),
        msgpack.packb(([1], "f4,f4", b"\0" * 8)),
        msgpack.packb(([1], "M8[s]", b"\0" * 8)),
        msgpack.packb(([2**64 - 1], "float32", b"")),
        msgpack.packb((["1"], "float32", b"\0" * 4)),
        msgpack.packb((7, "float32", b"")),
        msgpack.packb("nothing"),
        b"",
    ],
)
def test_impossible_arrays_are_damage(payload):
    with pytest.raises(errors.DamagedError):
        unpack(msgpack.packb({"a": msgpack.ExtType(1, payload)}), "x")


@pytest.mark.parametrize(
    "chunked",
    [
        {"shape": {"0": 2**40}, "chunks": {}},
        {"shape": {"1": 2}, "chunks": {"0": 1}},
        {"shape": 3, "chunks": {}},
        {},
    ],
)
def test_chunks_that_do_not_match_are_damage(chunked):
    body = {"a": {"__msgpack_chunked_array__": True, **chunked}}
    with pytest.raises(errors.DamagedError):
        unpack(msgpack.packb(body), "x")


def test_other_objects_are_not_packed():
    with pytest.raises(TypeError, match="'set'"):
        pack({"a": {1, 2}})


def test_keys_keep_their_order():
    assert list(unpack(pack({"version": 3, "optimizer": {"b": 1, "a": 2}}), "x")) == [
        "version",
        "optimizer",
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "bool", "complex64"])
def test_arrays_of_any_dtype_are_writable(dtype):
    array = np.ones(3).astype(getattr(ml_dtypes, dtype, dtype))
    loaded = unpack(pack({"a": array}), "x")["a"]
    assert (loaded.dtype, loaded.tobytes()) == (array.dtype, array.tobytes())
    loaded[:] = 0


@pytest.mark.parametrize("value", [msgpack.ExtType(7, b"\x80"), [msgpack.ExtType(7, b"\x80")]])
def test_unknown_types_are_damage(value):
    with pytest.raises(errors.DamagedError, match="unknown msgpack type 7"):
        unpack(msgpack.packb({"a": value}), "x")


def test_deep_nesting_is_damage():
    tree = {}
    for _ in range(200):
        tree = {"a": tree}
    with pytest.raises(errors.DamagedError, match="nested"):
        unpack(msgpack.packb(tree), "x")
