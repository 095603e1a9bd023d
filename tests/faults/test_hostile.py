"""A30: a checkpoint that names files elsewhere, or absurd sizes, is refused."""

import gzip
import json
import shutil

import msgpack
import numpy as np
import pytest

pytestmark = pytest.mark.slow


def array(shape, dtype="float32", data=b""):
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data), use_bin_type=True))


def spec(path, *, driver="zarr", kvstore="file", shape=(4,), **more):
    return {
        "driver": driver,
        "dtype": "float32",
        "kvstore": {"driver": kvstore, "path": path, **more},
        "metadata": {"shape": list(shape), "chunks": [4]},
    }


def write_zarr(folder, *, shape=(4,), chunks=(4,), chunk=None, **more):
    folder.mkdir(parents=True)
    facts = {
        "chunks": list(chunks),
        "shape": list(shape),
        "compressor": {"id": "gzip", "level": 1},
        "dimension_separator": ".",
        "dtype": "<f4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "zarr_format": 2,
        **more,
    }
    (folder / ".zarray").write_text(json.dumps(facts))
    data = np.arange(4, dtype="<f4").tobytes() if chunk is None else chunk
    (folder / "0").write_bytes(gzip.compress(data))


def write_step(root, leaf, *, zarr=None):
    """Writes a checkpoint whose only parameter is `leaf`."""
    step = root / "checkpoint_3"
    step.mkdir(parents=True)
    state = {"target": leaf if isinstance(leaf, dict) and "driver" not in leaf else {"w": leaf}}
    state["state"] = {"step": array([], "int32", b"\3\0\0\0")}
    body = {"version": 3, "optimizer": state}
    (step / "checkpoint").write_bytes(msgpack.packb(body, strict_types=True))
    if zarr is not None:
        write_zarr(step / "target.w", **zarr)
    return step


def elsewhere(tmp_path):
    """Paths that lead out of a checkpoint to a well-formed array."""
    outside = tmp_path / "CANARY"
    write_zarr(outside)
    up = "../../../CANARY/"
    return {
        "absolute": spec(f"{outside}/"),
        "parent": spec(up),
        "parent_in_the_middle": spec(f"target.w/{up}../"),
        "top_level_path": {**spec("x"), "kvstore": {"driver": "file"}, "path": f"{outside}/"},
        "http": spec("CANARY/", kvstore="http", base_url="http://127.0.0.1:9"),
        "memory": spec("CANARY/", kvstore="memory"),
        "s3": spec("CANARY/", kvstore="s3", bucket="b"),
        "other_array_driver": spec(f"{outside}/", driver="n5"),
        "cast_driver": spec("target.w/", driver="cast", base=spec(f"{outside}/")),
        "nested_kvstore": spec("x", kvstore="ocdbt", base=f"file://{outside}/"),
        "url_as_path": spec(f"file://{outside}/"),
        "nul": spec("target.w\0/"),
        "kvstore_as_string": {**spec("x"), "kvstore": f"file://{outside}/"},
    }


def bombs():
    """Leaves and zarr facts whose sizes cannot be true."""
    huge = (2**20, 2**20)
    return {
        "inline_shape": (array([2**40]), None),
        "negative_shape": (array([-1, -4], data=b"\0" * 16), None),
        "object_dtype": (array([1], "object", b"\0" * 8), None),
        "pickle_as_extension": (msgpack.ExtType(7, b"\x80\x04N."), None),
        "zarr_shape": (spec("target.w/", shape=huge), {"shape": huge, "chunks": huge}),
        "zarr_grid": (spec("target.w/", shape=huge), {"shape": huge, "chunks": (1, 1)}),
        "zarr_chunk": (spec("target.w/"), {"chunks": (2**40,)}),
        "zarr_no_chunk": (spec("target.w/", shape=(8,)), {"shape": (8,)}),
        "gzip": (spec("target.w/"), {"chunk": b"\0" * 2**28}),
        "other_shape": (spec("target.w/", shape=(2,)), {}),
        "filters": (spec("target.w/"), {"filters": [{"id": "pickle"}]}),
        "compressor": (spec("target.w/"), {"compressor": {"id": "evil"}}),
        "zero_chunks": (spec("target.w/"), {"chunks": (0,)}),
    }


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace, to see what is opened")
def test_nothing_outside_is_opened(launch, figure, tmp_path):
    cases = elsewhere(tmp_path)
    paths = [write_step(tmp_path / "steps" / name, leaf) for name, leaf in cases.items()]
    link = write_step(tmp_path / "steps" / "link", spec("target.w/"))
    (link / "target.w").symlink_to(tmp_path / "CANARY")
    inner = write_step(tmp_path / "steps" / "inner_link", spec("target.w/"), zarr={})
    (inner / "target.w" / "0").unlink()
    (inner / "target.w" / "0").symlink_to(tmp_path / "CANARY" / "0")
    log = tmp_path / "log"
    prefix = ["strace", "-f", "-qq", "-e", "trace=open,openat,connect,execve", "-o", log]
    code, facts, errors = launch("read_all.py", *paths, link, inner, prefix=prefix).wait()
    assert code == 0, errors
    assert {fact["outcome"] for fact in facts} <= {"unsafe", "damaged"}, facts
    arguments = [line for line in log.read_text().splitlines() if "execve" not in line]
    opened = [line for line in arguments if "CANARY" in line or "AF_INET" in line]
    assert opened == []
    figure(cases=len(facts), outside_opens=len(opened))


def test_absurd_sizes_are_refused_within_small_memory(launch, figure, tmp_path):
    cases = bombs()
    paths = [write_step(tmp_path / name, leaf, zarr=zarr) for name, (leaf, zarr) in cases.items()]
    good = write_step(tmp_path / "good", spec("target.w/"), zarr={})
    code, facts, errors = launch("read_all.py", good, *paths).wait()
    assert code == 0, errors
    assert [fact["outcome"] for fact in facts[:2]] == ["read", "read"]
    assert {fact["outcome"] for fact in facts[2:]} <= {"unsafe", "damaged"}, facts
    grown = facts[-1]["peak_mib"] - facts[1]["peak_mib"]
    assert grown < 64
    slowest = max(fact["seconds"] for fact in facts[2:])
    figure({"peak_mib_grown": grown, "slowest_seconds": slowest}, cases=len(facts))


def test_colliding_names_are_refused(launch, tmp_path):
    same = {"a": {"b": spec("target.w/")}, "a.b": spec("target.w/")}
    step = write_step(tmp_path, same, zarr={})
    _, facts, _ = launch("read_all.py", step).wait()
    assert [fact["outcome"] for fact in facts] == ["unsafe", "unsafe"]
