import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa.compat.jestimator import checkpoint_utils
from tekoa.estimator import MeanMetrics, TrainState
from tekoa.store import Store, t5x
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


def test_checkpoints_are_yielded_from_the_second_on_and_noted(model_dir):
    note = str(model_dir / "last_evaluated_ckpt")
    second = str(model_dir / "checkpoint_10")
    iterator = checkpoint_utils.checkpoints_iterator_from_oldest(str(model_dir), note)
    assert next(iterator) == second
    assert checkpoint_utils.last_evaluated_ckpt(note) == second
    with Store(model_dir, keep=[retention.KeepLast(3)]) as store:
        store.save(11, {"model_params": {"w": np.zeros(1)}})
    resumed = checkpoint_utils.checkpoints_iterator_from_oldest(
        str(model_dir), note, last_evaluated=second
    )
    assert next(resumed) == next(iterator) == str(model_dir / "checkpoint_11")


@pytest.fixture
def state():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            self.variable("memory", "last", jnp.zeros, 1)
            return nn.Dense(1, name="new")(nn.Embed(5, 2, name="embed")(ids))

    metrics = MeanMetrics.create("train_loss")
    rng = jax.random.key(0)
    return TrainState.create(metrics, optax.sgd(0.1), Model(), rng, jnp.zeros(1, jnp.int32))


def test_partial_restore_loads_what_the_checkpoint_has(state, tmp_path, caplog):
    tree = {
        "target": {"embed": {"embedding": np.ones((3, 2), "f4")}},
        "flax_mutables": {"memory": {"last": np.full(1, 7, "f4")}},
        "state": {"step": np.int32(9)},
    }
    t5x.write(tmp_path, 9, tree)
    restored = checkpoint_utils.partial_restore(state, t5x.read(tmp_path), load_step=True)
    before, after = (s.params["embed"]["embedding"] for s in (state, restored))
    np.testing.assert_array_equal(after, np.concatenate([np.ones((3, 2)), before[3:]]))
    np.testing.assert_array_equal(restored.params["new"]["kernel"], state.params["new"]["kernel"])
    assert restored.variables()["memory"]["last"] == 7
    assert (state.step, restored.step) == (0, 9)
    assert checkpoint_utils.partial_restore(state, tree).step == 0
    assert "new/kernel: missing" in caplog.text
    larger = {"embed": {"embedding": np.ones((9, 2), "f4")}}
    cut = checkpoint_utils.partial_restore(state, {"target": larger})
    np.testing.assert_array_equal(cut.params["embed"]["embedding"], np.ones((5, 2)))


def test_partial_restore_refuses_other_widths(state):
    wider = {"target": {"embed": {"embedding": np.ones((5, 3))}}}
    with pytest.raises(ValueError, match=r"'embed/embedding' has shape \(5, 3\)"):
        checkpoint_utils.partial_restore(state, wider)


def test_notes_of_an_evaluator_are_read(tmp_path):
    note, score = tmp_path / "last_evaluated_ckpt", tmp_path / "score"
    assert checkpoint_utils.last_evaluated_ckpt(str(note)) is None
    assert checkpoint_utils.last_score(str(score)) == -math.inf
    note.write_text("a/checkpoint_3")
    score.write_text("0.25")
    assert checkpoint_utils.last_evaluated_ckpt(str(note)) == "a/checkpoint_3"
    assert checkpoint_utils.last_score(str(score)) == 0.25
