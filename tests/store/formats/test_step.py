"""Opening one step: the format is detected, doubtful steps are refused."""

import os
import shutil

import numpy as np
import pytest

from tekoa.store import errors
from tekoa.store.commit import manifest
from tekoa.store.commit.identity import commit_id
from tekoa.store.formats.step import find, is_step, open_step


def test_format_is_detected(saved, golden):
    assert open_step(saved({"x": np.ones(1)}) / "checkpoint_5").index.items == ["x"]
    opened = open_step(golden / "ts_amos" / "checkpoint_12")
    assert opened.index.items[:2] == ["model_params", "optimizer_state"]


@pytest.mark.parametrize("format", ["native", "t5x"])
def test_our_step_without_a_manifest_is_not_committed(saved, format):
    step = saved({"model_params": np.ones(1)}, format=format) / "checkpoint_5"
    (step / "tekoa.manifest").unlink()
    with pytest.raises(errors.DamagedError, match="no manifest"):
        open_step(step)


def test_any_other_directory_is_not_a_step(tmp_path):
    with pytest.raises(errors.DamagedError, match="no manifest"):
        open_step(tmp_path)
    assert not is_step(tmp_path)


def test_links_inside_a_step_are_refused(saved, tmp_path):
    step = saved({"x": np.ones(1)}) / "checkpoint_5"
    os.rename(step / "default", tmp_path / "elsewhere")
    (step / "default").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.UnsafeError, match="is a link"):
        open_step(step, verify="none")


def test_unknown_format_is_refused(tmp_path):
    manifest.seal(tmp_path, step=5, format="zip", facts={})
    with pytest.raises(errors.NewerVersionError, match=r"'zip'.*Update Tekoa"):
        open_step(tmp_path)


def test_missing_step_raises_and_lists_existing_steps(saved):
    directory = saved({"x": np.ones(1)})
    assert find(directory, 5) == directory / "checkpoint_5"
    with pytest.raises(errors.StoreError, match=r"no step 3. Existing steps: \[5\]"):
        find(directory, 3)


def test_renamed_step_is_refused(saved):
    directory = saved({"x": np.ones(1)})
    os.rename(directory / "checkpoint_5", directory / "checkpoint_6")
    with pytest.raises(errors.DamagedError, match="contains step 5"):
        open_step(directory / "checkpoint_6")


def test_pipe_in_a_step_of_another_program_is_refused_without_reading_it(golden, tmp_path):
    step = tmp_path / "checkpoint_12"
    shutil.copytree(golden / "ts_amos" / "checkpoint_12", step)
    os.mkfifo(step / "pipe")
    with pytest.raises(errors.UnsafeError, match="pipe: is neither a file nor a directory"):
        open_step(step)
    with pytest.raises(OSError, match="not a regular file"):
        commit_id(step)
