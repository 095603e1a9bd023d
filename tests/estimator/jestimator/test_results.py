import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.estimator import Evaluator, MeanMetrics, Predictor

# ---- MeanMetrics


def update(metrics_mod, sums, *args):
    return metrics_mod.apply(sums, *args, method=MeanMetrics.update, mutable=["metrics"])


def test_means_are_over_everything_that_was_added():
    metrics_mod = MeanMetrics.create("loss", "other")
    sums = metrics_mod.init(jax.random.key(0))
    for total, count in ((6.0, 2), (jnp.int32(3), jnp.float32(1))):
        mean, sums = update(metrics_mod, sums, "loss", total, count)
    assert float(mean) == 3
    means = metrics_mod.apply(sums)
    assert {name: float(mean) for name, mean in means.items()} == {"loss": 3, "other": 0}
    assert float(metrics_mod.apply(sums, "loss")) == 3


def test_metrics_without_values_are_known():
    metrics_mod = MeanMetrics.create("loss", "other")
    _, sums = update(metrics_mod, metrics_mod.init(jax.random.key(0)), "loss", 0.0, 1.0)
    has_values = metrics_mod.apply(sums, method=MeanMetrics.gathered)
    assert {name: bool(has) for name, has in has_values.items()} == {"loss": True, "other": False}


def test_means_work_under_jit():
    metrics_mod = MeanMetrics.create("loss")
    sums = metrics_mod.init(jax.random.key(0))
    _, sums = jax.jit(lambda sums, x: update(metrics_mod, sums, "loss", x))(sums, 4.0)
    assert float(jax.jit(metrics_mod.apply)(sums)["loss"]) == 4


def test_an_unknown_metric_is_rejected():
    metrics_mod = MeanMetrics.create("loss")
    with pytest.raises(ValueError, match=r"no metric 'lost'; there are loss"):
        update(metrics_mod, metrics_mod.init(jax.random.key(0)), "lost", 1.0)


# ---- Evaluator


def accuracy(gold, predicted):
    return np.mean(np.asarray(gold) == np.asarray(predicted))


def test_scores_are_over_all_batches():
    evaluator = Evaluator({"accuracy": (lambda logits: logits.argmax(-1), accuracy)})
    for _ in range(2):  # A second evaluation starts from scratch.
        evaluator.reset_states()
        evaluator.update_state(np.array([0, 1]), np.array([[2, 1], [2, 1]]))
        evaluator.update_state(np.array([1]), np.array([[0, 1]]))
        assert evaluator.result() == {"accuracy": pytest.approx(2 / 3)}


def test_results_that_are_not_one_per_row_are_rejected():
    evaluator = Evaluator({"mean": (lambda results: [results.mean()], accuracy)})
    evaluator.update_state(np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="'mean' has 1 values for 3 examples"):
        evaluator.result()


# ---- Predictor


def double(results):
    return [2 * x for x in results]


def test_the_output_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "out.txt"
    predictor = Predictor(double, path, pre_str="begin", post_str="end")
    predictor.consume([1, 2])
    predictor.consume([3])
    assert not path.exists()
    predictor.complete()
    assert path.read_text().splitlines() == ["begin", "2", "4", "6", "end"]
    assert list(path.parent.iterdir()) == [path]


def test_lines_go_to_standard_output(capsys):
    predictor = Predictor(double, pre_str="begin")
    predictor.consume([1])
    predictor.complete()
    assert capsys.readouterr().out == "begin\n2\n"


def test_first_and_last_lines_are_written_without_results():
    assert list(Predictor(double, pre_str="a", post_str="b").last_lines()) == ["a", "b"]
