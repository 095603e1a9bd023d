"""A14, A16, A29: readers beside a writer, which neither harms the other."""

import os
import subprocess
import time

import pytest

from tekoa import store
from tekoa.store import errors, names

pytestmark = pytest.mark.slow

SIZE = 5000


def start_trainer(launch, directory, n_steps=1_000_000):
    args = ["--steps", n_steps, "--keep", 1, "--size", SIZE, "--quiet"]
    trainer = launch("trainer.py", directory, *args)
    trainer.read()
    while not names.list_steps(directory):
        time.sleep(0.01)
    return trainer


def check_reader(reader, limit_seconds):
    code, (result,), messages = reader.end(limit_seconds)
    assert code == 0, messages
    assert (result["failed"], result["wrong"]) == (0, 0), result
    assert result["restores"] > 0
    return result


@pytest.mark.parametrize("held", [False, True], ids=["in_place", "held_by_links"])
@pytest.mark.parametrize("seconds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_reader_survives_the_retention_of_a_trainer(launch, figure, tmp_path, held, seconds):
    trainer = start_trainer(launch, tmp_path / "run")
    own = tmp_path / "own" if held else "-"
    first = names.list_steps(tmp_path / "run")[-1]
    reader = launch("evaluator.py", tmp_path / "run", seconds, own, SIZE)
    result = check_reader(reader, seconds + 20)
    assert trainer.popen.poll() is None
    n_saved = names.list_steps(tmp_path / "run")[-1] - first
    assert n_saved > 1
    figure(**result, saved_meanwhile=n_saved)


@pytest.mark.slow
def test_twenty_evaluators_do_not_disturb_a_trainer(launch, figure, tmp_path):
    trainer = start_trainer(launch, tmp_path)
    results = []
    for _ in range(5):
        four = [launch("evaluator.py", tmp_path, 0.2, "-", SIZE) for _ in range(4)]
        results += [check_reader(reader, 40) for reader in four]
    assert trainer.popen.poll() is None
    trainer.popen.kill()
    _, errors = trainer.popen.communicate()
    assert "failed" not in errors
    figure(evaluators=len(results), failed_saves_of_trainer=0)


def test_read_only_directory_can_be_evaluated_and_refuses_a_trainer(launch, figure, tmp_path):
    run = tmp_path / "run"
    assert launch("trainer.py", run, "--steps", 2, "--size", SIZE).end()[0] == 0
    mount = f'mount --bind {run} {run} && mount -o remount,ro,bind {run} && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", mount, "sh"]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs unshare -m, to mount a directory read-only")
    before = sorted(os.listdir(run))
    check_reader(launch("evaluator.py", run, 0.2, "-", SIZE, prefix=prefix), 20)
    trainer = launch("trainer.py", run, prefix=prefix)
    code, facts, _ = trainer.end(20)
    assert (code, facts[0]["event"]) == (70, "refused")
    assert "Read-only" in facts[0]["message"]
    assert sorted(os.listdir(run)) == before
    figure(works="yes", seconds_to_error=round(trainer.seconds, 2))


def test_path_that_is_a_file_is_an_error_at_start(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.StoreError, match="cannot be written"):
        store.Store(tmp_path / "file")
