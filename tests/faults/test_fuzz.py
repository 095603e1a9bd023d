"""Neighbours of A6, A7 and A30: whatever stands in the files, only store errors come out."""

import json
import random
import shutil
import zlib

import numpy as np
import pytest

from tekoa import store
from tekoa.store import errors, t5x

N_CHANGES = 150
JUNK = [None, True, -1, 0, 2**70, 1.5, "", "x", "../x", [], [[]], {}, {"a": 1}, [2**40, 2**40]]


def change_bytes(data, chance):
    data = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        if chance.random() < 0.3:
            del data[at : at + chance.randint(1, 20)]
        else:
            data[at] = chance.randrange(256)
        if not data:
            break
    return bytes(data)


def change_json(node, chance):
    """Puts junk at a random place of a JSON value."""
    if not isinstance(node, dict | list) or not node or chance.random() < 0.15:
        return chance.choice(JUNK)
    key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
    node = dict(node) if isinstance(node, dict) else list(node)
    node[key] = change_json(node[key], chance)
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


def test_changed_index_with_a_manifest_that_agrees(step, figure):
    chance, good = random.Random(0), json.loads((step / "tekoa.json").read_text())
    seen = []
    for _ in range(N_CHANGES):
        seal(step, "tekoa.json", json.dumps(change_json(good, chance)).encode())
        seen.append(outcome(store.load, step))
    figure(refused=seen.count("refused"), harmless=seen.count("read"))


def test_changed_manifest_with_a_checksum_that_agrees(step, figure):
    chance = random.Random(0)
    good = json.loads((step / "tekoa.manifest").read_text().splitlines()[0])
    seen = []
    for _ in range(N_CHANGES):
        text = json.dumps(change_json(good, chance)).encode()
        (step / "tekoa.manifest").write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
        seen.append(outcome(store.load, step))
    figure(refused=seen.count("refused"), harmless=seen.count("read"))


@pytest.mark.parametrize("name", ["checkpoint", "target.w/.zarray", "target.w/0"])
def test_changed_t5x_files(tmp_path, figure, name):
    tree = {"target": {"w": np.arange(9.0)}, "state": {"step": 3, "param_states": {}}}
    made = t5x.write(tmp_path / "made", 3, tree, axes={"target": {"w": ()}})
    (made / "tekoa.manifest").unlink()
    chance, seen = random.Random(0), []
    good = (made / name).read_bytes()
    for _ in range(N_CHANGES):
        (made / name).write_bytes(change_bytes(good, chance))
        seen.append(outcome(t5x.read, made))
        seen.append(outcome(store.load, made))
    shutil.rmtree(made)
    figure(refused=seen.count("refused"), harmless=seen.count("read"))


def test_changed_zarray_facts(tmp_path, figure):
    made = t5x.write(tmp_path, 3, {"target": {"w": np.arange(9.0)}}, axes={"target": {"w": ()}})
    (made / "tekoa.manifest").unlink()
    path = made / "target.w" / ".zarray"
    chance, good, seen = random.Random(0), json.loads(path.read_text()), []
    for _ in range(N_CHANGES):
        path.write_text(json.dumps(change_json(good, chance)))
        seen.append(outcome(t5x.read, made))
    figure(refused=seen.count("refused"), harmless=seen.count("read"))


def test_deep_nesting_is_refused(step, tmp_path):
    (tmp_path / "checkpoint_2").mkdir()
    (tmp_path / "checkpoint_2" / "checkpoint").write_bytes(b"\x81\xa1a" * 900 + b"\xc0")
    assert outcome(t5x.read, tmp_path / "checkpoint_2") == "refused"
    seal(step, "tekoa.json", b"[" * 100_000)
    assert outcome(store.load, step) == "refused"
