"""One short training of the bundled CNN, shared by all tests of a process."""

import pytest

from tekoa.estimator.cli import main

# It imports `long_model`, which only works when the command runs it.
collect_ignore = ["short_model.py"]

SMALL = [
    "--train_batch_size=64",
    "--max_train_steps=25",
    "--check_every_steps=10",
    "--random_seed=3",
    "--noprogress",
    "--steps_per_dispatch=1",
]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A model dir with checkpoints 0, 10, 20, 25 and validation metrics."""
    directory = tmp_path_factory.mktemp("trained")
    code = main.main(
        ["train", "mnist", f"--model_dir={directory}", *SMALL, "--save_every_steps=20"]
    )
    assert code == 0
    return directory
