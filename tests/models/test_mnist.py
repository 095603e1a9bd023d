import jax
import numpy as np
import pytest

from tekoa import data
from tekoa.core import trees
from tekoa.estimator import DataFacts, UsageError
from tekoa.models import mnist
from tekoa.optim import amos_helper


def facts(pattern, batch_size=32):
    source = data.load(pattern)
    return DataFacts(
        info=source.info,
        n_examples=len(source),
        batch_size=batch_size,
        sample=next(source.batches(batch_size)),
    )


def config(**settings):
    result = mnist.get_config()
    result.update(settings)
    return result


def test_manual_scales_equal_those_of_jestimator():
    experiment = mnist.experiment(mnist.get_config(), facts("digits://split=train"))
    images = np.zeros((1, 28, 28, 1), np.uint8)
    params = experiment.model.init(jax.random.key(0), images)["params"]
    eta = amos_helper.params_fn_from_assign_map(mnist.ETA, eval_str_value=True)
    slots = amos_helper.params_fn_from_assign_map(mnist.SLOTS, eval_str_value=True)
    scales = {
        "/".join(name): (eta(name, leaf.shape), slots(name, leaf.shape))
        for name, leaf in zip(trees.leaf_names(params), jax.tree.leaves(params), strict=True)
    }
    expected = {
        "Conv_0/kernel": ((8 / 9) ** 0.5, (1, 1, 1, 32)),
        "Conv_1/kernel": ((2 / 288) ** 0.5, (1, 1, 1, 64)),
        "Dense_0/kernel": ((2 / 3136) ** 0.5, (1, 256)),
        "Dense_1/kernel": ((1 / 256) ** 0.5, (1, 10)),
        **{f"{name}/bias": (0.5, ()) for name in ["Conv_0", "Conv_1", "Dense_0", "Dense_1"]},
    }
    assert scales.keys() == expected.keys()
    for name, (scale, shape) in expected.items():
        assert scales[name][0] == pytest.approx(scale)
        assert scales[name][1] == shape


def test_pixels_are_scaled_by_the_range_of_the_data():
    images = next(data.load("digits://split=test").batches(4))["image"]
    params = mnist.CNN(10, (0.0, 16.0)).init(jax.random.key(0), images)
    same = mnist.CNN(10, (0.0, 255.0)).apply(params, images * (255.0 / 16.0))
    np.testing.assert_allclose(mnist.CNN(10, (0.0, 16.0)).apply(params, images), same, rtol=1e-5)


def test_amos_has_the_settings_of_jestimator_unless_they_are_set():
    data_facts = facts("digits://split=train")
    params = {"Dense_1": {"kernel": np.ones((4, 3), np.float32)}}
    grads = {"Dense_1": {"kernel": np.full((4, 3), 0.5, np.float32)}}

    def second_update(**settings):
        tx = mnist.experiment(config(optimizer="amos", **settings), data_facts).make_optimizer()
        state = tx.update(params, tx.init(params), params)[1]  # The rate of the first step is 0.
        return np.asarray(tx.update(grads, state, params)[0]["Dense_1"]["kernel"])

    np.testing.assert_array_equal(second_update(), second_update(warmup=500, amos_beta=0.98))
    for other in ({"warmup": 400}, {"amos_beta": 0.9}):
        assert not np.allclose(second_update(), second_update(**other), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 500}, r"config\.warmup: auto has no such setting.*config\.optimizer=amos"),
        ({"amos_beta": 0.98}, r"config\.amos_beta: auto has no such setting"),
        ({"optimizer": "adam"}, "must be 'auto' or 'amos', got 'adam'"),
    ],
)
def test_settings_that_would_be_ignored_are_usage_errors(settings, message):
    with pytest.raises(UsageError, match=message):
        mnist.experiment(config(**settings), facts("digits://split=train"))


def test_data_without_images_is_a_usage_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    with pytest.raises(UsageError, match="no images with labels"):
        mnist.experiment(mnist.get_config(), facts(str(path), batch_size=1))


def test_the_loss_is_a_sum_clipped_at_the_square_root_of_the_rows():
    data_facts = facts("digits://split=train")
    experiment = mnist.experiment(config(optimizer="amos"), data_facts)
    logits = np.random.default_rng(0).normal(size=(32, 10)).astype(np.float32)
    value, reported = mnist.loss(logits, data_facts.sample)
    np.testing.assert_allclose(value, 32 * np.mean(reported["loss"]), rtol=1e-6)

    tx = experiment.make_optimizer()
    params = {"Dense_1": {"kernel": np.ones((4, 3), np.float32)}}
    state = tx.init(params)
    state = tx.update(params, state, params)[1]  # The rate of the first step is 0.

    def update(size):
        grads = {"Dense_1": {"kernel": np.full((4, 3), size, np.float32)}}
        return np.asarray(tx.update(grads, state, params)[0]["Dense_1"]["kernel"])

    np.testing.assert_array_equal(update(100.0), update(32**0.5))
    assert not np.allclose(update(32**0.5), update(0.9 * 32**0.5), rtol=1e-6)
