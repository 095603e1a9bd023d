import dataclasses

import pytest

from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary


def make(kind=Checkpoint, **fields):
    given = {"state": None, "step": 7, "loss": 0.5, "grads": None, "elapsed_time": 1.0}
    return kind(**{**given, "n_completed_steps": 3, **fields})


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().step = 8


def test_metrics_are_added_to_a_copy_by_group():
    summary = make(Summary, metrics={"train": {"loss": 0.5}})
    more = summary.with_metrics("eval", {"loss": 0.4})
    assert more.metrics == {"train": {"loss": 0.5}, "eval": {"loss": 0.4}}
    assert summary.metrics == {"train": {"loss": 0.5}}


def test_a_checkpoint_becomes_a_summary_and_a_summary_stays_itself():
    checkpoint = make(data_state={"next": 3})
    summary = as_summary(checkpoint)
    assert (summary.step, summary.data_state, summary.metrics) == (7, {"next": 3}, {})
    assert as_summary(summary) is summary
