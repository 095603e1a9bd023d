"""The public names of the store."""

import subprocess
import sys

import pytest

from tekoa import store


def test_every_public_name_is_there_and_documented():
    for name in dir(store):
        assert getattr(store, name).__doc__


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = store.nothing


def test_submodules_are_reached_without_their_own_import():
    code = "import tekoa.store; print(tekoa.store.t5x.read.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "read\n"
