import math

import numpy as np
import pytest

from tekoa.compat.jestimator import checkpoint_utils
from tekoa.store import Store
from tekoa.store.commit import retention


@pytest.fixture
def model_dir(tmp_path):
    for directory in (tmp_path / "run", tmp_path / "other"):
        with Store(directory, keep=[retention.KeepLast(2)]) as store:
            for step in (9, 10):
                store.save(step, {"model_params": {"w": np.zeros(1)}})
        (directory / "checkpoint_11.tmp-1").mkdir()
    return tmp_path / "run"


def test_the_newest_checkpoint_is_used_unless_another_of_the_run_is_named(model_dir):
    latest = checkpoint_utils.latest_ckpt_path
    newest = str(model_dir / "checkpoint_10"), True
    named, other = str(model_dir / "checkpoint_9"), str(model_dir.parent / "other/checkpoint_9")
    assert latest(str(model_dir)) == newest
    assert latest(str(model_dir), other) == newest
    assert latest(str(model_dir), named) == (named, True)
    assert latest(str(model_dir.parent / "empty"), other) == (other, False)
    assert latest() == (None, False)
    with pytest.raises(ValueError, match="'step_'"):
        latest(str(model_dir), prefix="step_")


def test_checkpoints_are_sorted_by_step(model_dir):
    names = [path.rpartition("/")[2] for path in checkpoint_utils.sorted_checkpoints(model_dir)]
    assert names == ["checkpoint_9", "checkpoint_10"]


def test_notes_of_an_evaluator_are_read(tmp_path):
    note, score = tmp_path / "last_evaluated_ckpt", tmp_path / "score"
    assert checkpoint_utils.last_evaluated_ckpt(str(note)) is None
    assert checkpoint_utils.last_score(str(score)) == -math.inf
    note.write_text("a/checkpoint_3")
    score.write_text("0.25")
    assert checkpoint_utils.last_evaluated_ckpt(str(note)) == "a/checkpoint_3"
    assert checkpoint_utils.last_score(str(score)) == 0.25
