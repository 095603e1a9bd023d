"""A14, A16, A29: readers and a writer do not disturb each other."""

import os
import subprocess
import time

import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import paths

pytestmark = pytest.mark.slow

SIZE = 5000
READ_SECONDS = 2


def start_trainer(launch, directory, n_steps=1_000_000):
    args = ["--steps", n_steps, "--keep", 1, "--size", SIZE, "--quiet"]
    trainer = launch("trainer.py", directory, *args)
    trainer.read()
    while not paths.list_steps(directory):
        time.sleep(0.01)
    return trainer


def check_reader(reader):
    code, (result,), messages = reader.wait()
    assert code == 0, messages
    assert (result["failed"], result["wrong"]) == (0, 0), result
    assert result["restores"] > 0
    return result


@pytest.mark.parametrize("held", [False, True], ids=["in_place", "held_by_links"])
def test_a_reader_survives_the_retention_of_a_trainer(launch, figure, tmp_path, held):
    trainer = start_trainer(launch, tmp_path / "run")
    own = tmp_path / "own" if held else "-"
    first = paths.list_steps(tmp_path / "run")[-1]
    reader = launch("evaluator.py", tmp_path / "run", READ_SECONDS, own, SIZE)
    result = check_reader(reader)
    assert trainer.popen.poll() is None
    n_saved = paths.list_steps(tmp_path / "run")[-1] - first
    assert n_saved > 1
    measured = {"restores": result["restores"], "saved_meanwhile": n_saved}
    figure(measured, seconds=READ_SECONDS, failed=result["failed"], wrong=result["wrong"])


def test_twenty_evaluators_do_not_disturb_a_trainer(launch, figure, tmp_path):
    trainer = start_trainer(launch, tmp_path)
    results = []
    for _ in range(5):
        four = [launch("evaluator.py", tmp_path, 0.2, "-", SIZE) for _ in range(4)]
        results += [check_reader(reader) for reader in four]
    assert trainer.popen.poll() is None
    trainer.popen.kill()
    trainer.popen.wait()
    assert "failed" not in trainer.errors()
    figure(evaluators=len(results), failed_saves_of_trainer=0)


def test_read_only_directory_can_be_evaluated_and_refuses_a_trainer(launch, figure, tmp_path):
    run = tmp_path / "run"
    assert launch("trainer.py", run, "--steps", 2, "--size", SIZE).wait()[0] == 0
    mount = f'mount --bind {run} {run} && mount -o remount,ro,bind {run} && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", mount, "sh"]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs unshare -m, to mount a directory read-only")
    before = sorted(os.listdir(run))
    check_reader(launch("evaluator.py", run, 0.2, "-", SIZE, prefix=prefix))
    trainer = launch("trainer.py", run, prefix=prefix)
    code, facts, _ = trainer.wait()
    assert (code, facts[0]["event"]) == (70, "refused")
    assert "Read-only" in facts[0]["message"]
    assert sorted(os.listdir(run)) == before
    figure({"seconds_to_error": round(trainer.seconds, 1)}, exit_code=code)


def test_a_path_that_is_a_file_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.StoreError, match="Cannot write to"):
        store.Store(tmp_path / "file")
