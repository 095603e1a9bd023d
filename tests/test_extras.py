"""Optional packages."""

import json

import pytest

from tekoa import _extras


def test_a_package_that_is_there_is_imported():
    assert _extras.require("json", extra="x", what="This") is json


def test_a_missing_package_names_the_command_that_installs_it():
    with pytest.raises(_extras.MissingPackageError, match=r"pip install 'tekoa\[onnx\]'"):
        _extras.require("no_such_package", extra="onnx", what="Writing a.onnx")
