"""Writing arrays: chunks, what each process writes, and what the disk refuses."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from tekoa.core import hosts
from tekoa.store import array_writes, arrays, leaves


def sharded(value, *spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    return jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.P(*spec)))


def leaf_of(name, value):
    return leaves.Leaf(name=name, shape=value.shape, dtype=value.dtype.name)


def chunk_on_disk(directory, name):
    opened = ts.open(arrays.spec(directory / arrays.FOLDER, name)).result()
    return tuple(opened.chunk_layout.write_chunk.shape)


@hypothesis.given(
    shard=st.lists(st.integers(1, 200), max_size=4).map(tuple), max_size=st.integers(1, 5000)
)
def test_chunks_are_equal_parts_of_a_shard_and_not_too_many(shard, max_size):
    chunk = array_writes._chunk(shard, max_size)
    assert all(length % part == 0 for length, part in zip(shard, chunk, strict=True))
    if np.prod(shard) <= max_size:
        assert chunk == shard


def test_a_prime_length_stays_whole_and_others_are_split():
    assert array_writes._chunk((104729,), 1000) == (104729,)
    assert array_writes._chunk((4096, 512), 2**16) == (128, 512)
    assert array_writes._chunk((3, 1000), 100) == (1, 100)


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["as they lie", "in a transaction"])
def test_both_ways_of_writing_keep_every_byte(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(array_writes, "_SMALL_BYTES", limit)
    rng = np.random.default_rng(0)
    values = {("w", str(i)): rng.random((7, i + 1), np.float32) for i in range(40)}
    values |= {("step",): np.int32(7), ("zeros",): np.zeros((3, 5)), ("s",): sharded(rng.random(8))}
    array_writes.write(tmp_path, values)
    read = arrays.read(tmp_path, {name: leaf_of(name, x) for name, x in values.items()}, {})
    for name, value in values.items():
        assert read[name].tobytes() == np.asarray(value).tobytes()


def test_large_arrays_are_split_and_read_back_whole_or_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr(array_writes, "_MAX_CHUNK_BYTES", 256)
    value = np.arange(32 * 24, dtype=np.float32).reshape(32, 24)
    values = {("whole",): value, ("spread",): sharded(value, "a", "b")}
    array_writes.write(tmp_path, values)
    array_writes.merge(tmp_path)
    assert chunk_on_disk(tmp_path, ("whole",)) == (2, 24)
    assert chunk_on_disk(tmp_path, ("spread",)) == (4, 12)
    wanted = {name: leaf_of(name, value) for name in values}
    spread = sharded(value, "b").sharding
    for places in ({}, dict.fromkeys(values, spread)):
        read = arrays.read(tmp_path, wanted, places)
        for name in values:
            np.testing.assert_array_equal(read[name], value)


def test_zeros_are_stored_as_bytes_too(tmp_path):
    array_writes.write(tmp_path, {("x",): np.zeros(10_000, np.float32)})
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) >= 40_000


def test_replicas_of_a_shard_are_written_once(tmp_path):
    value = np.random.default_rng(0).random((8, 4096), np.float32)
    array_writes.write(tmp_path, {("x",): sharded(value, "a")})
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert value.nbytes <= sum(sizes) < 1.2 * value.nbytes


def test_processes_write_folders_of_their_own_that_are_joined(tmp_path, monkeypatch):
    value = np.arange(12.0)
    for index in (0, 1):
        group = FakeProcess(index)
        monkeypatch.setattr(hosts, "current", lambda group=group: group)
        array_writes.write(tmp_path, {("by", "all"): value})
    # Arrays that every process has are written by the first alone.
    assert array_writes.own_files(tmp_path, 1) == []
    mine = array_writes.own_files(tmp_path, 0)
    assert mine
    assert all(path.startswith("default/ocdbt.process_0/") for path in mine)
    assert not (tmp_path / "default/manifest.ocdbt").exists()
    array_writes.merge(tmp_path)
    read = arrays.read(tmp_path, {("by", "all"): leaf_of(("by", "all"), value)}, {})
    np.testing.assert_array_equal(read["by", "all"], value)
    with ocp.StandardCheckpointer() as reader:
        np.testing.assert_array_equal(reader.restore(tmp_path / "default")["by"]["all"], value)


class FakeProcess:
    count = 2

    def __init__(self, index):
        self.index, self.is_writer = index, index == 0


def test_own_files_of_a_process_are_those_that_only_it_writes(tmp_path):
    for name in ("ocdbt.process_0/d", "ocdbt.process_1/d", "d"):
        path = tmp_path / "default" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert array_writes.own_files(tmp_path, 1) == ["default/ocdbt.process_1/d"]
    assert array_writes.own_files(tmp_path, 2) == []


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_an_error_of_the_system_that_names_the_array(tmp_path):
    (tmp_path / "default").mkdir()
    (tmp_path / "default/d").symlink_to("/dev/full")
    with pytest.raises(OSError, match="array 'a/b' cannot be written"):
        array_writes.write(tmp_path, {("a", "b"): np.ones(5000)})
