import dataclasses

import numpy as np
import pytest

from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary, find_metric


def make(kind=Checkpoint, **fields):
    defaults = {"state": None, "step": 7, "loss": 0.5, "grads": None, "elapsed_time": 1.0}
    return kind(**{**defaults, "n_completed_steps": 3, **fields})


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().step = 8


def test_metrics_are_added_to_a_copy():
    summary = make(Summary, metrics={"train": {"loss": 0.5}})
    more = summary.with_metrics("eval", {"loss": 0.4})
    assert more.metrics == {"train": {"loss": 0.5}, "eval": {"loss": 0.4}}
    assert summary.metrics == {"train": {"loss": 0.5}}


def test_a_summary_is_returned_unchanged():
    checkpoint = make(data_state={"next": 3})
    summary = as_summary(checkpoint)
    assert (summary.step, summary.data_state, summary.metrics) == (7, {"next": 3}, {})
    assert as_summary(summary) is summary


def test_a_metric_is_found_by_group_and_name():
    summary = make(Summary, metrics={"train": {"loss": 0.5}})
    assert find_metric(summary, "train", "loss") == 0.5
    for checkpoint in (summary, make()):
        with pytest.raises(LookupError, match=r"^The checkpoint .* has no metric 'eval/loss'"):
            find_metric(checkpoint, "eval", "loss")


def test_scalars_have_joined_names():
    summary = make(Summary, metrics={"train": {"loss": 1}, "eval": {"loss": np.float32(2)}})
    assert summary.scalars == {"train/loss": 1.0, "eval/loss": 2.0}


def test_a_checkpoint_can_be_built_from_the_fields_of_the_guide():
    checkpoint = Checkpoint(
        model_params={"w": 1.0},
        model_state={"batch_stats": {"mean": 0.0}},
        optimizer_state=(),
        grads={"w": 0.1},
        loss=0.5,
        n_completed_steps=1,
        elapsed_time=2.0,
        step=7,
    )
    assert (checkpoint.model_params, int(checkpoint.state.step)) == ({"w": 1.0}, 7)
    assert as_summary(checkpoint).model_state == {"batch_stats": {"mean": 0.0}}
    assert Summary(model_params={}, metrics={"eval": {"lnpp": 1.0}}).step == 0
    with pytest.raises(TypeError, match="state and parts of it"):
        Checkpoint(state=checkpoint.state, model_params={}, step=7)
