"""Opening one step: the format is found, doubtful ones are refused."""

import os

import numpy as np
import pytest

from tekoa.store import errors, manifest, steps, t5x_step


def test_format_is_found_by_itself(saved, golden):
    assert isinstance(steps.open_step(saved({"x": np.ones(1)}) / "checkpoint_5"), steps.TekoaStep)
    opened = steps.open_step(golden / "ts_amos" / "checkpoint_12")
    assert isinstance(opened, t5x_step.T5XStep)


@pytest.mark.parametrize("layout", ["tekoa", "t5x"])
def test_own_step_without_its_manifest_is_not_committed(saved, layout):
    step = saved({"model_params": np.ones(1)}, layout=layout) / "checkpoint_5"
    (step / "tekoa.manifest").unlink()
    with pytest.raises(errors.DamagedError, match="no manifest"):
        steps.open_step(step)


def test_any_other_directory_is_not_a_step(tmp_path):
    with pytest.raises(errors.DamagedError, match="no manifest"):
        steps.open_step(tmp_path)
    assert not steps.is_step(tmp_path)


def test_links_inside_a_step_are_refused(saved, tmp_path):
    step = saved({"x": np.ones(1)}) / "checkpoint_5"
    os.rename(step / "default", tmp_path / "elsewhere")
    (step / "default").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.UnsafeError, match="is a link"):
        steps.open_step(step, verify="none")


def test_layout_of_the_future_is_refused(tmp_path):
    manifest.seal(tmp_path, step=5, layout="zip", facts={})
    with pytest.raises(errors.DamagedError, match=r"'zip'. Update Tekoa"):
        steps.open_step(tmp_path)


def test_missing_step_is_named_with_those_there(saved):
    directory = saved({"x": np.ones(1)})
    assert steps.find(directory, 5) == directory / "checkpoint_5"
    with pytest.raises(errors.StoreError, match=r"no step 3. Steps there: \[5\]"):
        steps.find(directory, 3)


def test_renamed_step_is_not_taken_for_another(saved):
    directory = saved({"x": np.ones(1)})
    os.rename(directory / "checkpoint_5", directory / "checkpoint_6")
    with pytest.raises(errors.DamagedError, match="holds step 5"):
        steps.open_step(directory / "checkpoint_6")
