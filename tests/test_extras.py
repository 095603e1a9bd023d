"""Optional packages."""

import json
import os
import subprocess
import sys

import pytest

from tekoa import _extras


def test_a_package_that_is_there_is_imported():
    assert _extras.require("json", extra="x", what="This") is json


def test_a_missing_package_names_the_command_that_installs_it():
    with pytest.raises(_extras.MissingPackageError, match=r"pip install 'tekoa\[onnx\]'"):
        _extras.require("no_such_package", extra="onnx", what="Writing a.onnx")


def test_points_are_written_without_importing_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    code = (
        "import sys; from tekoa import _extras\n"
        "events = _extras.import_inside('tensorboardX.proto.event_pb2')\n"
        "assert _extras.import_inside('tensorboardX.record_writer').masked_crc32c(b'x')\n"
        "assert not {'torch', 'tensorboardX'} & sys.modules.keys()\n"
        "sys.path.remove(sys.argv[1])\n"
        "import tensorboardX\n"
        "from tensorboardX.proto import event_pb2\n"
        "assert event_pb2 is events and tensorboardX.SummaryWriter"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, **path})
