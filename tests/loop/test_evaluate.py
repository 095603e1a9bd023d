import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tekoa import data as tekoa_data
from tekoa.loop.evaluate import EvalLoop
from tekoa.loop.task import EvalTask, TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.models import RNNLM
from tekoa.testing import count_compilations


@pytest.fixture
def checkpoint(line):
    return line.loop(ema=0.5).checkpoint()


def evaluate(line, data, checkpoint, metrics=None, **options):
    task = EvalTask(apply=line.apply, metrics=metrics or {"mse": line.mse}, data=data)
    return EvalLoop(task, model=line.params, **options)(checkpoint)


def expected(line, x, y):
    out = x.astype(np.float64) @ line.params["w"] + line.params["b"]
    return ((out - y) ** 2).mean()


def test_batches_are_weighted_by_their_rows(line, checkpoint):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10_007, 3)).astype(np.float32), rng.normal(size=10_007)
    data = [(x[i : i + 256], y[i : i + 256].astype(np.float32)) for i in range(0, 10_007, 256)]
    metrics = {"mse": line.mse, "each": lambda out, y: (out - y) ** 2}
    values = evaluate(line, data, checkpoint, metrics).metrics["eval"]
    assert values == pytest.approx(dict.fromkeys(metrics, expected(line, x, y)), rel=1e-6)


def test_the_summary_is_the_checkpoint_with_another_group(line, checkpoint):
    summary = evaluate(line, line.data(2), checkpoint, label="test")
    assert summary.state is checkpoint.state
    assert list(summary.metrics) == ["train", "test"]


def test_a_random_model_draws_anew_for_each_batch_and_the_same_in_each_evaluation(line, checkpoint):
    task = EvalTask(
        apply=lambda params, rng, x: jax.random.uniform(rng, x.shape[:1]),
        metrics={"mean": lambda out, _: out},
        data=line.data(1) * 2,
    )
    loops = [EvalLoop(task, model=line.params, n_steps=n) for n in (1, 2, 2)]
    one, two, again = (loop(checkpoint).metrics["eval"]["mean"] for loop in loops)
    assert one != two == again


def test_n_steps_limits_the_batches(line, checkpoint):
    data = line.data(5)
    mse = evaluate(line, data, checkpoint, n_steps=2).metrics["eval"]["mse"]
    x, y = (np.concatenate(arrays) for arrays in zip(*data[:2], strict=True))
    assert mse == pytest.approx(expected(line, x, y), rel=1e-6)


def test_a_dataset_is_read_from_its_start_every_time(line, checkpoint):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    batches = tekoa_data.as_source({"x": x}).batches(3, epochs=1, remainder="keep")
    task = EvalTask(
        apply=lambda p, batch: batch["x"], metrics={"m": lambda o, _: o.mean(1)}, data=batches
    )
    loop = EvalLoop(task, model=line.params)
    values = [loop(checkpoint).metrics["eval"]["m"] for _ in range(3)]
    assert values == pytest.approx([11.5] * 3)


def test_an_endless_generator_continues(line, checkpoint):
    stream = ((np.full((2, 3), i, np.float32), np.zeros(2)) for i in range(100))
    task = EvalTask(apply=lambda p, x: x, metrics={"m": lambda o, y: o.mean()}, data=stream)
    loop = EvalLoop(task, model=line.params, n_steps=2)
    assert [loop(checkpoint).metrics["eval"]["m"] for _ in range(2)] == [0.5, 2.5]


def test_exhausted_data_is_an_error(line, checkpoint):
    with pytest.raises(ValueError, match=r"'eval' evaluation yielded no batch. A generator can"):
        evaluate(line, iter([]), checkpoint)


def test_the_average_is_used_unless_disabled(line):
    last = list(line.loop(ema=0.5))[-1]
    x, y = line.data(1)[0]
    for use_average, params in ((True, last.average), (False, last.model_params)):
        mse = evaluate(line, [(x, y)], last, use_average=use_average).metrics["eval"]["mse"]
        by_hand = ((x @ np.asarray(params["w"]) + np.asarray(params["b"]) - y) ** 2).mean()
        assert mse == pytest.approx(by_hand, rel=1e-5)


def test_one_compilation_per_shape(line, checkpoint):
    data = line.data(4) + line.data(1, n_rows=5)
    task = EvalTask(apply=line.apply, metrics={"mse": line.mse}, data=data)
    loop = EvalLoop(task, model=line.params)
    loop(checkpoint)
    with count_compilations() as compiled:
        loop(checkpoint)
    assert compiled.names == []


def test_rows_that_do_not_divide_among_devices_are_weighted_correctly(line, checkpoint):
    data = line.data(2) + line.data(1, n_rows=5, seed=1)
    single = evaluate(line, data, checkpoint).metrics
    split = evaluate(line, data, checkpoint, devices=jax.devices()).metrics
    assert split["eval"] == pytest.approx(single["eval"], rel=1e-6)


def test_every_evaluation_starts_with_a_new_carry():
    model = RNNLM(vocab_size=5, d_model=4, deterministic=True)
    tokens = np.random.default_rng(0).integers(0, 5, (4, 2, 7))
    data = [(t[:, :-1], t[:, 1:]) for t in tokens]

    def loss(logits, y):
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    task = TrainTask(optimizer=optax.sgd(0.0), loss=loss, data=data, apply=model.apply)
    last = TrainLoop(model.init, task, n_steps=1).next_step()
    assert all(x.any() for x in jax.tree.leaves(last.carry))
    variables = {"params": last.model_params}
    by_hand = []
    for x, y in data:
        logits, changed = model.apply(variables, x, mutable=["carry"])
        variables = {**variables, **changed}
        by_hand.append(float(loss(logits, y)))
    loop = EvalLoop(EvalTask(apply=model.apply, metrics={"loss": loss}, data=data))
    for _ in range(2):
        value = loop(last).metrics["eval"]["loss"]
        assert value == pytest.approx(np.mean(by_hand), rel=1e-5)


def test_an_nnx_module_is_evaluated_with_the_weights_of_the_checkpoint(line):
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    loop = line.loop(model=module, apply=None, loss=lambda o, y: line.mse(o[:, 0], y))
    last = list(loop)[-1]
    x, y = line.data(1)[0]
    task = EvalTask(metrics={"mse": lambda o, y: line.mse(o[:, 0], y)}, data=[(x, y)])
    by_hand = ((np.asarray(loop.model(jnp.array(x)))[:, 0] - y) ** 2).mean()
    for model in (module, loop.model_fns):
        mse = EvalLoop(task, model=model)(last).metrics["eval"]["mse"]
        assert mse == pytest.approx(by_hand, rel=1e-5)


def test_the_names_of_the_original_guide_are_accepted(line, checkpoint):
    task = EvalTask(apply=line.apply, metrics={"mse": line.mse}, data=line.data(2))
    rng = jax.random.key(3)
    original = EvalLoop(task=task, init=line.params, rnkey=rng)(checkpoint)
    assert original.metrics == EvalLoop(task, model=line.params, rng=rng)(checkpoint).metrics
    with pytest.raises(TypeError, match="EvalLoop got 'init' in addition to 'model'"):
        EvalLoop(task, model=line.params, init=line.params)


def test_a_stop_flag_interrupts_the_evaluation(line, checkpoint):
    flag = threading.Event()
    flag.set()
    with pytest.raises(InterruptedError, match="step 0"):
        evaluate(line, line.data(2), checkpoint, stop_flag=flag)


@pytest.mark.parametrize(
    ("metrics", "data", "error", "message"),
    [
        ({}, [], ValueError, "at least one metric"),
        ({"m": lambda o, y: "good"}, None, TypeError, "Metric 'm' must return a number"),
        ({"m": lambda o, y: o}, ["a"], TypeError, "pairs"),
        ({"m": lambda o, y: o}, [(np.zeros((2, 3)), "a")], TypeError, "Entry '1'"),
    ],
)
def test_bad_input_is_an_error(line, checkpoint, metrics, data, error, message):
    data = line.data(1) if data is None else data
    task = EvalTask(apply=line.apply, metrics=metrics, data=data)
    with pytest.raises(error, match=message):
        EvalLoop(task, model=line.params)(checkpoint)


def test_a_model_is_required(line):
    with pytest.raises(TypeError, match=r"EvalLoop needs a model: EvalTask\(apply="):
        EvalLoop(EvalTask(metrics={"m": line.mse}, data=[]))


def area_under_curve(scores, labels):
    """The share of pairs of a positive and a negative row that are in order."""
    scores, labels = np.asarray(scores), np.asarray(labels) > 0
    return np.mean(scores[labels][:, None] > scores[~labels][None])


@pytest.mark.parametrize("metrics", [{}, {"mse": None}])
def test_gathered_metrics_see_the_rows_of_all_batches(line, checkpoint, metrics):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(25, 3)).astype(np.float32), rng.normal(size=25).astype(np.float32)
    data = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 25, 10)]
    task = EvalTask(
        line.apply,
        dict.fromkeys(metrics, line.mse),
        data,
        gathered={"area": area_under_curve, "rows": lambda out, y: len(out)},
    )
    for devices in (None, jax.devices()[:1]):
        loop = EvalLoop(task, model=line.params, devices=devices)
        values = loop(checkpoint).metrics["eval"]
        scores = x @ np.asarray(line.params["w"]) + np.asarray(line.params["b"])
        assert values["area"] == pytest.approx(area_under_curve(scores, y))
        assert values["rows"] == 25
        assert list(values) == [*metrics, "area", "rows"]


def test_a_name_is_either_gathered_or_not(line):
    task = EvalTask(line.apply, {"mse": line.mse}, line.data(1), gathered={"mse": line.mse})
    with pytest.raises(ValueError, match="'mse' both in metrics and in gathered"):
        EvalLoop(task, model=line.params)
