"""Golden T5X checkpoints, saved steps, and groups of processes in threads."""

import pytest

from support import coordination, files
from tekoa import store


@pytest.fixture
def golden():
    """The directory of checkpoints written by T5X itself."""
    return files.GOLDEN / "t5x"


@pytest.fixture
def saved(tmp_path):
    """A function that saves trees as step 5 and returns the directory of steps."""

    def save(items, **options):
        with store.Store(tmp_path / "saved", **options) as writer:
            writer.save(5, items, meta={"position": 9})
        return tmp_path / "saved"

    return save


@pytest.fixture
def on_each():
    """A function that runs work as several processes, which are threads here."""
    return coordination.run_on_each
