"""Files that tests read: those in the repository, and data sets that are not part of it."""

import os
import pathlib

import pytest

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
_BESIDE = pathlib.Path(__file__).parents[3] / "shared"
_DATA = pathlib.Path(os.environ.get("TEKOA_DATA", _BESIDE / "data"))


def original(name):
    """Returns the path of a document that Tekoa follows, which may not be on this machine."""
    return _BESIDE / "originals" / name


def data_set(name):
    """Returns the directory of a real data set; skips the test if it is not on this machine."""
    if not (_DATA / name).is_dir():
        pytest.skip(f"needs the data set {name}: set TEKOA_DATA to a directory with {name}/")
    return _DATA / name
