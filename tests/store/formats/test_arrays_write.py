"""Writing arrays: chunks, shares of several processes, and full disks."""

import math
import pathlib
import socket
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import tensorstore as ts

from tekoa import hosts
from tekoa.store import errors
from tekoa.store.formats import arrays_read, arrays_write
from tekoa.store.formats.leaves import Leaf


def sharded(value, *spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    return jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.P(*spec)))


def describe(name, value):
    return Leaf(name=name, shape=value.shape, dtype=value.dtype.name)


def chunk_on_disk(directory, name):
    opened = ts.open(arrays_read.spec(directory / arrays_read.FOLDER, name)).result()
    return tuple(opened.chunk_layout.write_chunk.shape)


@hypothesis.given(
    shard=st.lists(st.integers(1, 200), max_size=4).map(tuple), max_size=st.integers(1, 5000)
)
def test_chunks_are_equal_parts_of_a_shard_and_not_too_many(shard, max_size):
    chunk = arrays_write._chunk(shard, max_size)
    assert all(length % part == 0 for length, part in zip(shard, chunk, strict=True))
    n_needed = -(-math.prod(shard) // max_size)
    assert math.prod(shard) // math.prod(chunk) <= 16 * n_needed
    if n_needed == 1:
        assert chunk == shard


def test_a_prime_length_is_not_split():
    assert arrays_write._chunk((104729,), 1000) == (104729,)
    assert arrays_write._chunk((4096, 512), 2**16) == (128, 512)
    assert arrays_write._chunk((3, 1000), 100) == (1, 100)


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["directly", "in a transaction"])
def test_both_ways_of_writing_keep_every_byte(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(arrays_write, "_SMALL_BYTES", limit)
    rng = np.random.default_rng(0)
    values = {("w", str(i)): rng.random((7, i + 1), np.float32) for i in range(40)}
    values |= {
        ("step",): np.int32(7),
        ("zeros",): np.zeros((3, 5)),
        ("s",): sharded(rng.random(8), "a"),
    }
    arrays_write.write(tmp_path, values)
    read = arrays_read.read(tmp_path, {name: describe(name, x) for name, x in values.items()}, {})
    for name, value in values.items():
        assert read[name].tobytes() == np.asarray(value).tobytes()


def test_large_arrays_are_split_and_read_back_complete_or_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays_write, "_MAX_CHUNK_BYTES", 256)
    value = np.arange(32 * 24, dtype=np.float32).reshape(32, 24)
    values = {("whole",): value, ("spread",): sharded(value, "a", "b")}
    arrays_write.write(tmp_path, values)
    arrays_write.merge(tmp_path)
    assert chunk_on_disk(tmp_path, ("whole",)) == (2, 24)
    assert chunk_on_disk(tmp_path, ("spread",)) == (4, 12)
    leaves = {name: describe(name, value) for name in values}
    spread = sharded(value, "b").sharding
    for shardings in ({}, dict.fromkeys(values, spread)):
        read = arrays_read.read(tmp_path, leaves, shardings)
        for name in values:
            np.testing.assert_array_equal(read[name], value)


def test_zeros_are_stored_as_bytes_too(tmp_path):
    arrays_write.write(tmp_path, {("x",): np.zeros(10_000, np.float32)})
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) >= 40_000


def test_small_arrays_have_their_full_size_on_disk(tmp_path):
    # A smaller size would count as damage.
    values = {(str(i),): np.zeros(24, np.float32) for i in range(300)}
    arrays_write.write(tmp_path, values)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "_METADATA"]
    assert sum(path.stat().st_size for path in files) >= 300 * 96


def test_replicas_of_a_shard_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays_write, "_SMALL_BYTES", 0)
    value = np.random.default_rng(0).random((8, 4096), np.float32)
    arrays_write.write(tmp_path, {("x",): sharded(value, "a")})
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert value.nbytes <= sum(sizes) < 1.2 * value.nbytes


def test_processes_write_separate_folders_that_are_merged(tmp_path, monkeypatch):
    value = np.arange(12.0)
    for index in (0, 1, 2):
        group = FakeProcess(index)
        monkeypatch.setattr(hosts, "current", lambda group=group: group)
        arrays_write.write(tmp_path, {("by", "all"): value})
    group.is_writer = True
    arrays_write.write(tmp_path, {("more",): value + 1})
    # Arrays that every process has are written by process 0 alone.
    assert arrays_write.own_files(tmp_path, 1) == []
    own = arrays_write.own_files(tmp_path, 0)
    assert own
    assert all(path.startswith("default/ocdbt.process_0/") for path in own)
    assert not (tmp_path / "default/manifest.ocdbt").exists()
    arrays_write.merge(tmp_path)
    names = [("by", "all"), ("more",)]
    read = arrays_read.read(tmp_path, {name: describe(name, value) for name in names}, {})
    np.testing.assert_array_equal(read["by", "all"], value)
    np.testing.assert_array_equal(read["more",], value + 1)


PROGRAM = """
import pathlib, sys
import jax
import numpy as np
from tekoa.store import errors
from tekoa.store.formats import arrays_write

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = jax.make_mesh((jax.device_count(),), ("a",))
place = jax.sharding.NamedSharding(mesh, jax.P("a"))
x = jax.make_array_from_callback((16,), place, lambda part: np.arange(16.0)[part])
directory = pathlib.Path(sys.argv[3])
try:
    arrays_write.write(directory, {("x",): x})
except errors.StoreError as error:
    assert "is partly on devices of other processes" in str(error)
    assert not list(directory.iterdir())
    print("refused")
"""


@pytest.mark.slow
def test_processes_unknown_to_the_store_do_not_write_partial_arrays(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROGRAM, address]
    processes = [
        subprocess.Popen([*command, str(i), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    assert [process.communicate(timeout=100)[0] for process in processes] == ["refused\n"] * 2


def test_an_array_sharded_over_one_of_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "current", lambda: FakeProcess(0))
    with pytest.raises(
        errors.StoreError, match="'x' is sharded over the devices of this process alone"
    ):
        arrays_write.write(tmp_path, {("x",): sharded(np.arange(8.0), "a")})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_merging_is_an_os_error(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "current", lambda: FakeProcess(0))
    arrays_write.write(tmp_path, {("x",): np.arange(8.0)})
    (tmp_path / "default/d").symlink_to("/dev/full")
    with pytest.raises(OSError, match="the index of all arrays cannot be written"):
        arrays_write.merge(tmp_path)


class FakeProcess:
    count = 3

    def __init__(self, index):
        self.index, self.is_writer = index, index == 0


def test_own_files_are_those_that_only_this_process_writes(tmp_path):
    for name in ("ocdbt.process_0/d", "ocdbt.process_1/d", "d"):
        path = tmp_path / "default" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert arrays_write.own_files(tmp_path, 1) == ["default/ocdbt.process_1/d"]
    assert arrays_write.own_files(tmp_path, 2) == []


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_an_os_error_that_names_the_array(tmp_path):
    (tmp_path / "default").mkdir()
    (tmp_path / "default/d").symlink_to("/dev/full")
    with pytest.raises(OSError, match="array 'a/b' cannot be written"):
        arrays_write.write(tmp_path, {("a", "b"): np.ones(5000)})
