"""A6 to A9: damaged steps are detected, named and quarantined; the one before is used."""

import os
import random

import numpy as np
import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import durable
from tekoa.store.commit import paths as paths_lib

pytestmark = pytest.mark.slow


def fill(directory, n_steps=2):
    with store.Store(directory, keep=[store.KeepLast(5)]) as writer:
        for step in range(1, n_steps + 1):
            tree = {"a": np.arange(20000, dtype=np.float32) * step, "b": np.full(3, step)}
            writer.save(step, {"model_params": tree}, meta={"position": step})
            writer.wait()
    return {"model_params": {"a": np.zeros(20000, np.float32), "b": np.zeros(3, int)}}


def step_files(directory, step):
    root = paths_lib.step_dir(directory, step)
    return [root / path for path, is_dir in durable.walk(root) if not is_dir]


def check_fell_back(directory, target, damaged):
    with store.Store(directory) as writer:
        restored = writer.restore(target)
    assert restored.step == 1
    assert restored.items["model_params"]["b"].tolist() == [1, 1, 1]
    assert np.array_equal(restored.items["model_params"]["a"], np.arange(20000, dtype=np.float32))
    assert [skip.step for skip in restored.skipped] == [2]
    assert damaged.name in restored.skipped[0].reason
    assert sorted(path.name.partition("-")[0] for path in directory.iterdir()) == [
        "checkpoint_1",
        "checkpoint_2.bad",
    ]


def test_twenty_bit_flips_are_detected_and_the_step_before_is_restored(figure, tmp_path):
    rng = random.Random(0)
    for i in range(20):
        target = fill(tmp_path / str(i))
        paths = step_files(tmp_path / str(i), 2)
        # Every file gets its turn, the large ones with the arrays most often.
        path = paths[i] if i < len(paths) else max(paths, key=lambda p: p.stat().st_size)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        check_fell_back(tmp_path / str(i), target, path)
    figure(bit_flips=20, detected=20, restored_the_step_before=20)


def test_truncated_files_are_detected_and_the_step_before_is_restored(figure, tmp_path):
    n_files = len(step_files(tmp_path / "0", 2) if fill(tmp_path / "0") else [])
    for case in range(2 * n_files):
        directory = tmp_path / f"case{case}"
        target = fill(directory)
        paths = step_files(directory, 2)  # Their number may differ by one from save to save.
        path = paths[case // 2 % len(paths)]
        os.truncate(path, path.stat().st_size // 2 if case % 2 else 0)
        check_fell_back(directory, target, path)
    figure({"cases": 2 * n_files}, all_handled=True)


def test_deleted_files_are_detected_and_the_step_before_is_restored(figure, tmp_path):
    n_files = len(step_files(tmp_path / "0", 2) if fill(tmp_path / "0") else [])
    for case in range(n_files):
        directory = tmp_path / f"case{case}"
        target = fill(directory)
        paths = step_files(directory, 2)
        paths[case % len(paths)].unlink()
        with store.Store(directory) as writer:
            assert writer.restore(target).step == 1
    figure({"cases": n_files}, all_handled=True)


@pytest.mark.parametrize("verify", ["none", "size", "full"])
def test_missing_array_data_is_detected_at_every_level_of_verification(tmp_path, verify):
    target = fill(tmp_path)
    largest = max(step_files(tmp_path, 2), key=lambda path: path.stat().st_size)
    largest.unlink()
    assert store.restore(tmp_path, target, verify=verify).step == 1


def test_all_steps_damaged_is_an_error_and_changes_nothing(launch, figure, tmp_path):
    target = fill(tmp_path, n_steps=3)
    for step in (1, 2, 3):
        os.truncate(max(step_files(tmp_path, step), key=lambda p: p.stat().st_size), 100)

    def snapshot():
        return {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    before = snapshot()
    for _ in range(2):
        with pytest.raises(errors.NothingUsableError, match=r"(?s)step 3.*step 2.*step 1"):
            store.restore(tmp_path, target)
    process = launch("trainer.py", tmp_path)
    code, facts, _ = process.wait()
    assert (code, facts[0]["event"]) == (65, "refused")
    assert snapshot() == before
    figure(exit_code=code, bytes_changed=0)


def test_a_directory_of_quarantined_steps_is_not_empty(tmp_path):
    target = fill(tmp_path, n_steps=1)
    paths_lib.step_dir(tmp_path, 1).rename(paths_lib.new_dir(tmp_path, 1, "bad"))
    with pytest.raises(errors.NothingUsableError, match="quarantined"):
        store.restore(tmp_path, target)
