import itertools
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tekoa import data


@pytest.fixture
def sharding():
    mesh = jax.make_mesh((8,), ("data",))
    return NamedSharding(mesh, PartitionSpec("data"))


def source(n=64):
    return data.as_source({"x": np.arange(n, dtype=np.float32), "y": np.zeros((n, 3), np.int32)})


def test_batches_arrive_with_the_sharding(sharding):
    plain = list(source().batches(16, epochs=1, shuffle=True))
    on_device = list(data.device_prefetch(source().batches(16, epochs=1, shuffle=True), sharding))
    assert len(on_device) == 4
    for a, b in zip(plain, on_device, strict=True):
        assert b["x"].sharding == sharding
        assert len(b["y"].addressable_shards) == 8
        np.testing.assert_array_equal(a["x"], b["x"])


def test_each_array_can_have_its_own_sharding(sharding):
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    batch = next(data.device_prefetch(source().batches(16), {"x": sharding, "y": whole}))
    assert batch["x"].sharding == sharding
    assert batch["y"].sharding == whole


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_position_counts_the_batches_returned(size):
    batches = data.device_prefetch(source().batches(8, shuffle=True, seed=2), size=size)
    assert batches.state()["batch"] == 0
    rows = []
    for i in range(6):
        assert batches.state()["batch"] == i
        rows.append(np.asarray(next(batches)["x"]).tolist())
    restored = data.device_prefetch(source().batches(8, shuffle=True, seed=2), size=size)
    restored.restore({**batches.state(), "batch": 3, "examples": 24})
    assert np.asarray(next(restored)["x"]).tolist() == rows[3]


def test_restoring_discards_prefetched_batches():
    batches = data.device_prefetch(source().batches(8), size=3)
    start = batches.state()
    first = np.asarray(next(batches)["x"]).tolist()
    next(batches)
    batches.restore(start)
    assert np.asarray(next(batches)["x"]).tolist() == first


def test_iteration_stops_after_the_last_batch():
    batches = data.device_prefetch(source().batches(16, epochs=1), size=10)
    assert len(list(batches)) == 4
    with pytest.raises(StopIteration):
        next(batches)


def test_any_iterable_of_batches_can_be_prefetched():
    endless = ({"x": np.full(2, i)} for i in itertools.count())
    batches = data.device_prefetch(endless)
    assert [int(next(batches)["x"][0]) for _ in range(3)] == [0, 1, 2]
    assert batches.state()["batch"] == 3


def test_text_is_refused_with_its_value():
    texts = data.as_source([{"text": "some words"}, {"text": "more"}])
    with pytest.raises(data.DataError, match=r"cannot be put on a device: .*some words"):
        next(data.device_prefetch(texts.batches(2)))


def test_a_changed_pipeline_is_refused_unless_allowed():
    state = data.device_prefetch(source().batches(8, seed=1)).state()
    batches = data.device_prefetch(source().batches(8, seed=2))
    with pytest.raises(data.ChangedDataError, match="seed was 1, is 2"):
        batches.restore(state)
    batches.restore(state, allow_changes=True)


def test_size_zero_is_refused():
    with pytest.raises(ValueError, match="size must be at least 1"):
        data.device_prefetch(source().batches(8), size=0)


TWO_PROCESSES = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tekoa import data

index, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, index)
mesh = jax.make_mesh((4,), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
source = data.as_source({"x": np.arange(40), "y": np.arange(40)})
whole = source.batches(8, shuffle=True, seed=1)
parts = source.batches(8, shuffle=True, seed=1, shard=(jax.process_index(), jax.process_count()))
for shardings in (sharding, {"x": sharding, "y": sharding}):
    batches = data.device_prefetch(parts, shardings)
    expected, batch = next(whole), next(batches)
    parts.restore(batches.state())
    assert batch["x"].shape == (8,)
    for shard in batch["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, expected["x"][shard.index])
assert len(batch["y"].addressable_shards) == 2
"""


@pytest.mark.slow
def test_the_rows_of_all_processes_form_the_global_batch():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    runs = [
        subprocess.Popen([sys.executable, "-c", TWO_PROCESSES, str(at), str(port)], env=environment)
        for at in range(2)
    ]
    assert [run.wait(timeout=100) for run in runs] == [0, 0]
