import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as sk

from tekoa.core import metrics as metrics_lib
from tekoa.fitting import metric_names
from tekoa.fitting.loss_names import find_loss

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 7, size=101)
LOGITS = (RNG.normal(size=(101, 7)) + 1.5 * np.eye(7)[LABELS]).astype(np.float32)
YES = RNG.integers(0, 2, size=101)
SCORES = (RNG.normal(size=101) + YES).astype(np.float32)
REALS = RNG.normal(size=101).astype(np.float32)


def measure(name, outputs, targets, sizes=(32, 32, 32, 5)):
    """The metric over uneven batches, each under jit."""
    metric = jax.jit(metric_names.find_metrics(name)[name])
    parts = np.split(np.arange(len(outputs)), np.cumsum(sizes)[:-1])
    values = [{name: metric(jnp.asarray(outputs[i]), jnp.asarray(targets[i]))} for i in parts]
    sums = metrics_lib.zeros_like(jax.eval_shape(lambda: values[0]))
    for value in values:
        sums = metrics_lib.merge(sums, value)
    return metrics_lib.compute(sums)[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", sk.accuracy_score(LABELS, LOGITS.argmax(1))),
        ("top5", sk.top_k_accuracy_score(LABELS, LOGITS, k=5)),
        ("f1", sk.f1_score(LABELS, LOGITS.argmax(1), average="macro")),
        ("precision", sk.precision_score(LABELS, LOGITS.argmax(1), average="macro")),
        ("recall", sk.recall_score(LABELS, LOGITS.argmax(1), average="macro")),
        ("perplexity", np.exp(sk.log_loss(LABELS, np.array(jax.nn.softmax(LOGITS))))),
    ],
)
def test_metrics_of_classes_are_those_of_scikit_learn(name, expected):
    assert measure(name, LOGITS, LABELS) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", sk.accuracy_score(YES, SCORES > 0)),
        ("f1", sk.f1_score(YES, SCORES > 0)),
        ("precision", sk.precision_score(YES, SCORES > 0)),
        ("recall", sk.recall_score(YES, SCORES > 0)),
    ],
)
def test_metrics_of_yes_or_no_are_those_of_scikit_learn(name, expected):
    assert measure(name, SCORES, YES) == pytest.approx(expected, rel=1e-5)
    assert measure(name, SCORES[:, None], YES) == pytest.approx(expected, rel=1e-5)


def test_the_area_under_the_curve_is_within_a_bin_of_scikit_learns():
    assert measure("auc", SCORES, YES) == pytest.approx(sk.roc_auc_score(YES, SCORES), abs=1e-3)
    two = np.stack([1 - SCORES / 2, 1 + SCORES / 2], axis=1)  # The logits of no and yes.
    assert measure("auc", two, YES) == pytest.approx(measure("auc", SCORES, YES), abs=1e-6)
    assert measure("auc", SCORES[:1], np.ones(1), sizes=(1,)) != measure("auc", SCORES, YES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mse", sk.mean_squared_error(REALS, SCORES)),
        ("rmse", sk.root_mean_squared_error(REALS, SCORES)),
        ("mae", sk.mean_absolute_error(REALS, SCORES)),
        ("r2", sk.r2_score(REALS, SCORES)),
    ],
)
def test_metrics_of_numbers_are_those_of_scikit_learn(name, expected):
    assert measure(name, SCORES, REALS) == pytest.approx(expected, rel=1e-4)


def test_ignored_labels_do_not_count():
    labels = np.where(np.arange(101) < 50, LABELS, -1)
    expected = sk.accuracy_score(LABELS[:50], LOGITS[:50].argmax(1))
    assert measure("accuracy", LOGITS, labels) == pytest.approx(expected)
    expected = sk.f1_score(LABELS[:50], LOGITS[:50].argmax(1), average="macro")
    assert measure("f1", LOGITS, labels) == pytest.approx(expected, rel=1e-5)


def test_equal_or_nan_logits_are_not_all_correct():
    labels = np.arange(7)
    assert measure("accuracy", np.zeros((7, 7), np.float32), labels, (7,)) == pytest.approx(1 / 7)
    assert measure("accuracy", np.full((7, 7), np.nan, np.float32), labels, (7,)) == 0


def test_names_and_functions_are_found():
    assert list(metric_names.find_metrics("accuracy")) == ["accuracy"]
    assert metric_names.find_metrics({"mine": len}) == {"mine": len}
    assert metric_names.find_metrics({"acc": "accuracy"})["acc"] is metric_names.accuracy
    with pytest.raises(ValueError, match=r"no metric 'acuracy'. Did you mean 'accuracy'"):
        metric_names.find_metrics(["acuracy"])
    with pytest.raises(TypeError, match="'mine' must be a name or a function, got 3"):
        metric_names.find_metrics({"mine": 3})


def test_what_is_better_is_known_or_asked():
    assert (metric_names.best_mode("loss"), metric_names.best_mode("f1")) == ("min", "max")
    with pytest.raises(ValueError, match=r"best=\('mine', 'max'\)"):
        metric_names.best_mode("mine")


def test_one_hot_targets_of_a_smoothed_cross_entropy_are_classes_too():
    logits = jnp.float32([[2.0, 1.0, 0.5], [0.1, 0.2, 3.0]])
    one_hot = jnp.float32([[1, 0, 0], [0, 1, 0]])
    for loss in (find_loss("cross_entropy"), find_loss("cross_entropy", label_smoothing=0.1)):
        (accuracy,) = metric_names.find_metrics("accuracy", loss).values()
        assert float(accuracy(logits, one_hot).compute()) == 0.5
