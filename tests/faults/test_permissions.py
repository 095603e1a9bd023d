"""Runs that a user may not write, or may not read: one clear line, and nothing is changed.

Root may do everything, so the commands run without its powers over files.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tekoa.extensions import run_record
from tekoa.store.store import Store

DROP = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--"]


@pytest.fixture
def ordinary_user():
    """The words before a command that take root's powers over files from it."""
    if os.geteuid() != 0:
        return []
    is_there = shutil.which(DROP[0]) is not None
    if not is_there or subprocess.run([*DROP, "true"], check=False).returncode:
        pytest.skip("needs setpriv, to run commands without the powers of root")
    return DROP


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    with Store(path) as store:
        for step in (3, 6):
            store.save(step, {"model_params": {"w": np.full(3, float(step))}})
            store.wait()
    run_record.write_start(path, {"random_seed": 1}, step=0)
    yield path
    path.chmod(0o700)


def entries(run):
    return sorted(str(path) for path in run.rglob("*"))


CASES = {
    # What is forbidden -> for each command: its code, and what it says.
    "writing": ("", 0o555, {"resume": (70, "Cannot write to"), "inspect": (0, "6"), "page": (0,)}),
    "everything": (
        "",
        0,
        {
            "resume": (70, "Cannot write to"),
            "inspect": (2, "run: Permission denied"),
            "page": (2, "run: Permission denied"),
            "convert": (2, "Permission denied"),
        },
    ),
    "the record": (
        "run.json",
        0,
        {"inspect": (65, "denied"), "page": (65, "denied"), "convert": (0, "Wrote")},
    ),
    "a step": (
        "checkpoint_6/tekoa.manifest",
        0,
        {
            "resume": (2, "tekoa.manifest"),
            "inspect": (65, "tekoa.manifest"),
            "convert": (2, "tekoa.manifest: Permission denied"),
        },
    ),
}


@pytest.mark.parametrize(("place", "mode", "expected"), CASES.values(), ids=CASES)
def test_what_is_forbidden_is_one_line_and_no_damage(
    run, launch, ordinary_user, place, mode, expected
):
    before = entries(run)
    (run / place).chmod(mode)
    arguments = {
        "resume": [run],
        "inspect": [run],
        "page": [run, f"--out={run.parent / 'page.html'}"],
        "convert": [run, run.parent / "copy", "--to=native"],
    }
    commands = [[name, *map(str, arguments[name])] for name in expected]
    program = launch("commands.py", json.dumps(commands), prefix=ordinary_user)
    _, results, error = program.wait()
    assert len(results) == len(commands), error
    for (name, (code, *texts)), result in zip(expected.items(), results, strict=True):
        assert result["code"] == code, (name, result)
        assert all(text in result["output"] for text in texts), (name, result)
        assert "Traceback" not in result["output"]
        assert "is damaged" not in result["output"]
    (run / place).chmod(0o700)
    # Above all, the step is not quarantined.
    assert entries(run) == before


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="test_hostile_runs.py has no powers of root anyway")
def test_readers_survive_hostile_runs_without_the_powers_of_root(ordinary_user):
    file = pathlib.Path(__file__).with_name("test_hostile_runs.py")
    command = [*ordinary_user, sys.executable, "-m", "pytest", "-n0", "-q", "-mnot slow", file]
    # The options of this run may name files that the user may not write.
    env = {**os.environ, "PYTEST_ADDOPTS": ""}
    tests = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=env
    )
    assert tests.returncode == 0, tests.stdout
