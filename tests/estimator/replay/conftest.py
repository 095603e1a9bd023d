"""A run to replay, trained once; tests that change it work on a copy."""

import pathlib
import shutil

import pytest

from tekoa.estimator.cli import main

MODEL = str(pathlib.Path(__file__).parent / "rated_model.py")


@pytest.fixture(scope="session")
def train():
    """Returns a function that trains the model and returns the exit code."""
    return lambda directory, *flags: main.main(["train", MODEL, f"--model_dir={directory}", *flags])


@pytest.fixture(scope="session")
def trained(train, tmp_path_factory):
    """A run of 40 steps with checkpoints at 0, 10, 20, 30 and 40; not to be changed."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    assert train(directory) == 0
    return directory


@pytest.fixture
def run_copy(trained, tmp_path):
    """A copy of that run, to be changed."""
    return shutil.copytree(trained, tmp_path / "run")
