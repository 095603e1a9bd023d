"""Golden T5X checkpoints, and steps to read."""

import pathlib

import pytest

from tekoa import store

GOLDEN = pathlib.Path(__file__).parents[3] / "shared" / "fixtures" / "t5x"


@pytest.fixture
def golden():
    """The directory of checkpoints that the original T5X wrote."""
    if not GOLDEN.is_dir():
        pytest.skip(f"needs the golden files in {GOLDEN}")
    return GOLDEN


@pytest.fixture
def saved(tmp_path):
    """Saves trees as step 5 and gives the directory of steps."""

    def save(items, **options):
        with store.Store(tmp_path / "saved", **options) as writer:
            writer.save(5, items, meta={"position": 9})
        return tmp_path / "saved"

    return save
