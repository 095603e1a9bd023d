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
    return EvalLoop(task, init=line.params, **options)(checkpoint)


def expected(line, x, y):
    out = x.astype(np.float64) @ line.params["w"] + line.params["b"]
    return ((out - y) ** 2).mean()


def test_ten_thousand_and_seven_examples_are_weighted_right(line, checkpoint):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10_007, 3)).astype(np.float32), rng.normal(size=10_007)
    data = [(x[i : i + 256], y[i : i + 256].astype(np.float32)) for i in range(0, 10_007, 256)]
    metrics = {"mse": line.mse, "each": lambda out, y: (out - y) ** 2}
    found = evaluate(line, data, checkpoint, metrics).metrics["eval"]
    assert found == pytest.approx(dict.fromkeys(metrics, expected(line, x, y)), rel=1e-6)


def test_the_summary_is_the_checkpoint_with_one_group_more(line, checkpoint):
    summary = evaluate(line, line.data(2), checkpoint, label="test")
    assert summary.state is checkpoint.state
    assert list(summary.metrics) == ["train", "test"]


def test_n_steps_limits_the_batches(line, checkpoint):
    data = line.data(5)
    found = evaluate(line, data, checkpoint, n_steps=2).metrics["eval"]["mse"]
    x, y = (np.concatenate(arrays) for arrays in zip(*data[:2], strict=True))
    assert found == pytest.approx(expected(line, x, y), rel=1e-6)


def test_finite_data_is_read_from_its_start_every_time(line, checkpoint):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    batches = tekoa_data.as_source({"x": x}).batches(3, epochs=1, remainder="keep")
    task = EvalTask(
        apply=lambda p, batch: batch["x"], metrics={"m": lambda o, _: o.mean(1)}, data=batches
    )
    loop = EvalLoop(task, init=line.params)
    found = [loop(checkpoint).metrics["eval"]["m"] for _ in range(3)]
    assert found == pytest.approx([11.5] * 3)


def test_an_endless_generator_goes_on(line, checkpoint):
    stream = ((np.full((2, 3), i, np.float32), np.zeros(2)) for i in range(100))
    task = EvalTask(apply=lambda p, x: x, metrics={"m": lambda o, y: o.mean()}, data=stream)
    loop = EvalLoop(task, init=line.params, n_steps=2)
    assert [loop(checkpoint).metrics["eval"]["m"] for _ in range(2)] == [0.5, 2.5]


def test_data_that_was_used_up_is_told(line, checkpoint):
    with pytest.raises(ValueError, match=r"'eval' evaluation yielded no batch. A generator can"):
        evaluate(line, iter([]), checkpoint)


def test_the_average_is_used_unless_told_not_to(line):
    last = list(line.loop(ema=0.5))[-1]
    x, y = line.data(1)[0]
    for use_average, params in ((True, last.average), (False, last.model_params)):
        found = evaluate(line, [(x, y)], last, use_average=use_average).metrics["eval"]["mse"]
        wanted = ((x @ np.asarray(params["w"]) + np.asarray(params["b"]) - y) ** 2).mean()
        assert found == pytest.approx(wanted, rel=1e-5)


def test_one_compilation_per_shape(line, checkpoint):
    data = line.data(4) + line.data(1, n_rows=5)
    task = EvalTask(apply=line.apply, metrics={"mse": line.mse}, data=data)
    loop = EvalLoop(task, init=line.params)
    loop(checkpoint)
    with count_compilations() as compiled:
        loop(checkpoint)
    assert compiled.names == []


def test_rows_that_do_not_divide_among_devices_still_count_right(line, checkpoint):
    data = line.data(2) + line.data(1, n_rows=5, seed=1)
    alone = evaluate(line, data, checkpoint).metrics
    split = evaluate(line, data, checkpoint, devices=jax.devices()).metrics
    assert split["eval"] == pytest.approx(alone["eval"], rel=1e-6)


def test_a_carry_starts_anew_at_every_evaluation():
    model = RNNLM(vocab_size=5, d_model=4, deterministic=True)
    tokens = np.random.default_rng(0).integers(0, 5, (4, 2, 7))
    data = [(t[:, :-1], t[:, 1:]) for t in tokens]

    def loss(logits, y):
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    task = TrainTask(optimizer=optax.sgd(0.0), loss=loss, data=data, apply=model.apply)
    last = TrainLoop(init=model.init, task=task, n_steps=1).next_step()
    assert all(x.any() for x in jax.tree.leaves(last.carry))
    variables = {"params": last.model_params}
    by_hand = []
    for x, y in data:
        logits, changed = model.apply(variables, x, mutable=["carry"])
        variables = {**variables, **changed}
        by_hand.append(float(loss(logits, y)))
    loop = EvalLoop(EvalTask(apply=model.apply, metrics={"loss": loss}, data=data))
    for _ in range(2):
        found = loop(last).metrics["eval"]["loss"]
        assert found == pytest.approx(np.mean(by_hand), rel=1e-5)


def test_an_nnx_module_is_evaluated_with_the_checkpoints_weights(line):
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    loop = line.loop(init=module, model=None, loss=lambda o, y: line.mse(o[:, 0], y))
    last = list(loop)[-1]
    x, y = line.data(1)[0]
    task = EvalTask(metrics={"mse": lambda o, y: line.mse(o[:, 0], y)}, data=[(x, y)])
    wanted = ((np.asarray(loop.model(jnp.array(x)))[:, 0] - y) ** 2).mean()
    for init in (module, loop.model_fns):
        found = EvalLoop(task, init=init)(last).metrics["eval"]["mse"]
        assert found == pytest.approx(wanted, rel=1e-5)


def test_a_flag_gives_the_evaluation_up(line, checkpoint):
    flag = threading.Event()
    flag.set()
    with pytest.raises(InterruptedError, match="step 0"):
        evaluate(line, line.data(2), checkpoint, stop_flag=flag)


@pytest.mark.parametrize(
    ("metrics", "data", "error", "said"),
    [
        ({}, [], ValueError, "at least one metric"),
        ({"m": lambda o, y: "good"}, None, TypeError, "Metric 'm' must give a number"),
        ({"m": lambda o, y: o}, ["a"], TypeError, "pairs"),
        ({"m": lambda o, y: o}, [(np.zeros((2, 3)), "a")], TypeError, "Entry '1'"),
    ],
)
def test_bad_input_is_told(line, checkpoint, metrics, data, error, said):
    data = line.data(1) if data is None else data
    task = EvalTask(apply=line.apply, metrics=metrics, data=data)
    with pytest.raises(error, match=said):
        EvalLoop(task, init=line.params)(checkpoint)


def test_a_model_is_needed(line):
    with pytest.raises(TypeError, match=r"EvalLoop needs a model: EvalTask\(apply="):
        EvalLoop(EvalTask(metrics={"m": line.mse}, data=[]))
