"""Around A6, A7 and A30: whatever the files contain, only store errors are raised."""

import json
import pathlib
import random
import shutil
import zlib

import numpy as np
import pytest

from support.processes import python
from tekoa import store
from tekoa.estimator.cli import main
from tekoa.store import errors, t5x

N_CHANGES = 150
JUNK = [None, True, -1, 0, 2**70, 1.5, "", "x", "../x", [], [[]], {}, {"a": 1}, [2**40, 2**40]]


def change_bytes(data, rng):
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        if rng.random() < 0.3:
            del data[at : at + rng.randint(1, 20)]
        else:
            data[at] = rng.randrange(256)
        if not data:
            break
    return bytes(data)


def change_json(node, rng):
    """Replaces a random part of a JSON value with junk."""
    if not isinstance(node, dict | list) or not node or rng.random() < 0.15:
        return rng.choice(JUNK)
    key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
    node = dict(node) if isinstance(node, dict) else list(node)
    node[key] = change_json(node[key], rng)
    return node


def outcome(read, path):
    try:
        read(path)
    except errors.StoreError:
        return "refused"
    return "read"


def seal(step, name, data):
    """Writes a file of a step and makes the manifest agree, as an attacker would."""
    (step / name).write_bytes(data)
    body = json.loads((step / "tekoa.manifest").read_text().splitlines()[0])
    body["files"][name] = [len(data), zlib.crc32(data)]
    text = json.dumps(body).encode()
    (step / "tekoa.manifest").write_bytes(text + b"\n%08x\n" % zlib.crc32(text))


@pytest.fixture
def step(tmp_path):
    with store.Store(tmp_path) as writer:
        tree = {"a": np.arange(6.0), "b": {"c": np.ones((2, 2), np.int8)}, "n": 3}
        writer.save(1, {"model_params": tree}, meta={"x": 1}, metrics={"loss": 0.5})
    return tmp_path / "checkpoint_1"


def test_changed_index_with_a_manifest_that_agrees(step):
    rng, good = random.Random(0), json.loads((step / "tekoa.json").read_text())
    outcomes = []
    for _ in range(N_CHANGES):
        seal(step, "tekoa.json", json.dumps(change_json(good, rng)).encode())
        outcomes.append(outcome(store.load, step))
    assert outcomes.count("refused") > outcomes.count("read")


def test_changed_manifest_with_a_checksum_that_agrees(step):
    rng = random.Random(0)
    good = json.loads((step / "tekoa.manifest").read_text().splitlines()[0])
    outcomes = []
    for _ in range(N_CHANGES):
        text = json.dumps(change_json(good, rng)).encode()
        (step / "tekoa.manifest").write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
        outcomes.append(outcome(store.load, step))
    assert outcomes.count("refused") > outcomes.count("read")


@pytest.mark.parametrize(
    "leaf",
    [
        [["model_params", "a"], [6], "9" * 5000, "array", ""],
        [["model_params", "a"], [6], ",8", "array", ""],
        [["model_params", "a"], [10**400], "float64", "array", ""],
        [["model_params", "a"], [10**3000, 10**3000], "float64", "array", ""],
        [["model_params", "a"], [-1], "float64", "array", ""],
        [[], [6], "float64", "array", ""],
    ],
    ids=lambda leaf: str(leaf)[:40],
)
def test_impossible_leaves_are_refused_by_every_reader(step, leaf, capsys):
    index = json.loads((step / "tekoa.json").read_text())
    index["leaves"][0] = leaf
    seal(step, "tekoa.json", json.dumps(index).encode())
    assert outcome(store.load, step) == "refused"
    assert main.main(["inspect", str(step)]) in (0, 65)


def test_metrics_larger_than_any_float_are_refused(step):
    index = json.loads((step / "tekoa.json").read_text())
    index["metrics"]["loss"] = 10**400
    seal(step, "tekoa.json", json.dumps(index).encode())
    assert outcome(store.load, step) == "refused"
    assert main.main(["inspect", str(step)]) == 65


@pytest.mark.parametrize("dtype", [",8", "<,8", "<" + "9" * 5000, "|O"])
def test_impossible_dtypes_of_zarr_arrays_are_refused(tmp_path, dtype):
    step = t5x.write(tmp_path, 3, {"target": {"w": np.arange(9.0)}}, axes={"target": {"w": ()}})
    (step / "tekoa.manifest").unlink()
    path = step / "target.w" / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": dtype}))
    assert outcome(t5x.read, step) == "refused"


@pytest.mark.parametrize("name", ["checkpoint", "target.w/.zarray", "target.w/0"])
def test_changed_t5x_files(tmp_path, name):
    tree = {"target": {"w": np.arange(9.0)}, "state": {"step": 3, "param_states": {}}}
    step_path = t5x.write(tmp_path / "run", 3, tree, axes={"target": {"w": ()}})
    (step_path / "tekoa.manifest").unlink()
    rng, outcomes = random.Random(0), []
    good = (step_path / name).read_bytes()
    for _ in range(N_CHANGES):
        (step_path / name).write_bytes(change_bytes(good, rng))
        outcomes.append(outcome(t5x.read, step_path))
        outcomes.append(outcome(store.load, step_path))
    shutil.rmtree(step_path)
    assert outcomes.count("refused") > outcomes.count("read")


def test_changed_zarray_facts(tmp_path):
    step_path = t5x.write(
        tmp_path, 3, {"target": {"w": np.arange(9.0)}}, axes={"target": {"w": ()}}
    )
    (step_path / "tekoa.manifest").unlink()
    path = step_path / "target.w" / ".zarray"
    rng, good, outcomes = random.Random(0), json.loads(path.read_text()), []
    for _ in range(N_CHANGES):
        path.write_text(json.dumps(change_json(good, rng)))
        outcomes.append(outcome(t5x.read, step_path))
    assert outcomes.count("refused") > outcomes.count("read")


def test_deep_nesting_is_refused(step, tmp_path):
    (tmp_path / "checkpoint_2").mkdir()
    (tmp_path / "checkpoint_2" / "checkpoint").write_bytes(b"\x81\xa1a" * 900 + b"\xc0")
    assert outcome(t5x.read, tmp_path / "checkpoint_2") == "refused"
    seal(step, "tekoa.json", b"[" * 100_000)
    assert outcome(store.load, step) == "refused"


@pytest.mark.slow
def test_the_fuzzer_reads_and_finds_nothing_at_once(tmp_path):
    program = pathlib.Path(__file__).parent / "fuzz"
    options = ["--seconds=2", f"--out={tmp_path}"]
    fuzzer = python(program, "npz", "manifest", *options)
    lines = fuzzer.stdout.splitlines()
    assert len(lines) == 2, fuzzer.stderr
    for line in lines:
        assert int(line.split()[1]) > 0
        assert line.endswith("findings: []")
