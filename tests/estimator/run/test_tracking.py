import contextlib
import types

import pytest

from tekoa.estimator.cli import flags
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run import tracking


def run(tmp_path, *words):
    module = types.SimpleNamespace(__name__="models.net")
    return types.SimpleNamespace(config=flags.parse(words)[1], module=module, model_dir=tmp_path)


def test_each_named_tracker_is_there_once(tmp_path):
    with contextlib.ExitStack() as stack:
        assert len(tracking.trackers(run(tmp_path, "--track=csv,csv"), stack)) == 1
        assert not tracking.trackers(run(tmp_path), stack)


def test_an_unknown_name_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"--track: There is no tracker 'cvs'.*'csv'"):
        tracking.trackers(run(tmp_path, "--track=cvs"), contextlib.ExitStack())
