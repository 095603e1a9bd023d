"""The LSTM against a forward pass in numpy, written from the specification alone."""

import json
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa import store
from tekoa.bridges import any_model
from tekoa.core import objective, trees
from tekoa.core import step as steps
from tekoa.data import DataError
from tekoa.estimator import DataFacts, UsageError
from tekoa.estimator.cli import main
from tekoa.loop.checkpoint import Summary
from tekoa.loop.evaluate import EvalLoop
from tekoa.loop.task import EvalTask, TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.models import lstm_lm
from tekoa.optim import amos_helper

H, M, V = 6, 10, 7  # Hidden, memory, vocabulary.
FORGET = 1.0


def shift_norm(x, shift):
    x = x - shift
    x = x - x.mean()
    return x / math.sqrt(max((x * x).mean() * math.sqrt(len(x)), 1))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_logits(params, tokens, start_id=0):
    """Returns the logits of a complete stream, token by token, in double precision."""
    p = {k: np.asarray(v, np.float64) for k, v in trees.flatten_named(params).items()}
    recurrent, memory, logits = np.zeros(H), np.zeros(M), []
    for token in [start_id, *tokens[:-1]]:
        x = np.concatenate([recurrent, p["embed/embedding"][token]])
        x = shift_norm(x, p["lstm/normalize/shift"])
        core = np.tensordot(x, p["lstm/cell/core/kernel"], 1) + p["lstm/cell/core/bias"]
        a, b, g, o = core
        gate = sigmoid(FORGET - g)
        b = np.clip(np.tanh(b) / (1 + math.exp(FORGET)), -gate, gate)
        memory = memory * (1 - gate) + b * 2 * (a * sigmoid(a))
        read = shift_norm(memory, p["lstm/cell/normalize/shift"]) * 2 * sigmoid(o)
        recurrent = read @ p["lstm/cell/out/kernel"] + p["lstm/cell/out/bias"]
        logits.append(p["embed/embedding"] @ recurrent + p["bias"])
    return np.array(logits)


def numpy_scores(params, tokens):
    costs, ranks = [], []
    for scores, true in zip(numpy_logits(params, tokens), tokens, strict=True):
        costs.append(np.log(np.exp(scores).sum()) - scores[true])
        ranks.append(1 / (scores >= scores[true]).sum())
    return np.mean(costs), np.exp(np.mean(costs)), np.mean(ranks)


def randomize(params, seed=0):
    """Returns parameters large enough for every part of the arithmetic to matter."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)


@pytest.fixture(scope="module")
def model():
    return lstm_lm.LstmLM(V, 0, H, M, FORGET)


@pytest.fixture(scope="module")
def variables(model):
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    return {**variables, "params": randomize(variables["params"])}


@pytest.fixture(scope="module")
def apply(model):
    def run(variables, tokens, *is_first, train=False, rng=0):
        rngs = {"dropout": jax.random.key(rng)}
        return model.apply(variables, tokens, *is_first, train=train, rngs=rngs, mutable=["carry"])

    return jax.jit(run, static_argnames="train")


def with_rows(variables, n_rows):
    carry = jax.tree.map(lambda x: jnp.repeat(x, n_rows, 0), variables["carry"])
    return {**variables, "carry": carry}


def facts(source, batch_size):
    return DataFacts(
        info=source.info,
        n_examples=len(source),
        batch_size=batch_size,
        sample=next(source.batches(batch_size)),
    )


def small(**opt_config):
    config = lstm_lm.get_config()
    config.seq_length = 8
    config.model_config.update(hidden_size=H, memory_size=M)
    config.opt_config.update(opt_config)
    return config


def consecutive(source, batch_size, n):
    batches = source.batches(batch_size, shuffle=True, consecutive=n)
    for i, batch in enumerate(batches):
        yield {**batch, "is_first": np.full(batch_size, i % n == 0)}


def state_after_training(experiment, batch):
    """Returns a state whose parameters and carry differ from the initial ones."""
    fns = any_model.as_model_fns(experiment.model)
    inputs, _ = experiment.split(batch)
    state = steps.init_state(fns, experiment.make_optimizer(), jax.random.key(0), inputs=inputs)
    carry = jax.tree.map(lambda x: x + 1, state.carry)
    return state.replace(params=randomize(state.params), carry=carry), fns


def checkpoint_of(state):
    return Summary(
        state=state,
        step=0,
        loss=jnp.zeros(()),
        grads=None,
        n_completed_steps=0,
        elapsed_time=0.0,
    )


def test_config_has_the_names_and_defaults_of_jestimator():
    """Except for the optimizer, whose default is "auto", and its rate."""
    config = lstm_lm.get_config()
    # Added by Tekoa.
    del config.opt_config["scales"], config.opt_config["groups"]
    del config["lora"], config["label_smoothing"], config["z_loss"]
    assert config.to_dict() == {
        "seq_length": 64,
        "vocab_path": None,
        "model_config": {
            "hidden_size": 256,
            "memory_size": 1024,
            "forget_gate_bias": 1.0,
            "hidden_dropout_rate": 0.55,
            "memory_dropout_rate": 0.1,
        },
        "opt_config": {
            "optimizer": "auto",
            "learning_rate": None,
            "momentum": 0.9,
            "beta": 0.99,
            "weight_decay": 0.01,
        },
    }


def test_adam_without_a_rate_has_that_of_jestimator():
    config = small(optimizer="adam")
    source = lstm_lm.open_data(config, "sample://split=valid", train=True)
    optimizer = lstm_lm.experiment(config, facts(source, 2)).make_optimizer()
    # The first step of Adam is the rate, against the sign of the gradient.
    update, _ = optimizer.update({"w": jnp.ones(3)}, optimizer.init({"w": jnp.zeros(3)}))
    np.testing.assert_allclose(update["w"], -5e-4, rtol=1e-5)


def test_parameters_have_the_names_and_shapes_of_jestimator(variables):
    shapes = {k: v.shape for k, v in trees.flatten_named(variables["params"]).items()}
    assert shapes == {
        "bias": (V,),
        "embed/embedding": (V, H),
        "lstm/cell/core/bias": (4, M),
        "lstm/cell/core/kernel": (2 * H, 4, M),
        "lstm/cell/normalize/shift": (M,),
        "lstm/cell/out/bias": (H,),
        "lstm/cell/out/kernel": (M, H),
        "lstm/normalize/shift": (2 * H,),
    }


def test_logits_equal_numpy(variables, apply):
    tokens = np.array([3, 1, 4, 1, 5])
    logits, _ = apply(variables, tokens[None])
    expected = numpy_logits(variables["params"], tokens)
    np.testing.assert_allclose(logits[0], expected, rtol=2e-4, atol=2e-4)


def write_text(directory):
    """Writes a text and its vocabulary; returns the tokens."""
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(["a", "b", "c", "d", "e"], 1 + i % 5)) for i in range(9)]
    (directory / "text.txt").write_text("\n".join(lines) + "\n")
    words = ["<s>", "</s>", "a", "b", "c", "d", "e"]
    (directory / "vocab.txt").write_text("".join(f"{word} 1\n" for word in words))
    return [words.index(word) for line in lines for word in [*line.split(), "</s>"]]


def test_evaluation_of_a_complete_stream_equals_numpy(tmp_path):
    """A file at batch size 1, with a shorter last sequence."""
    tokens = write_text(tmp_path)
    config = small(optimizer="adam")
    config.vocab_path = str(tmp_path / "vocab.txt")
    pattern = str(tmp_path / "text.txt")
    source = lstm_lm.open_data(config, pattern, train=False)
    assert len(tokens) % config.seq_length != 0
    experiment = lstm_lm.experiment(config, facts(source, 2))
    state, fns = state_after_training(experiment, next(source.batches(2)))
    batches = list(source.batches(1, epochs=1, remainder="keep"))
    task = EvalTask(metrics=experiment.metrics, data=batches, split=experiment.split)
    measure = EvalLoop(task, init=fns)
    scores = experiment.finish_metrics(measure(checkpoint_of(state)).metrics["eval"])
    cost, perplexity, mrr = numpy_scores(state.params, tokens)
    assert scores["cost"] == pytest.approx(cost, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert scores["mrr"] == pytest.approx(mrr, rel=1e-5)
    # The carry of training has no effect, and a second evaluation returns the same.
    assert experiment.finish_metrics(measure(checkpoint_of(state)).metrics["eval"]) == scores


@pytest.mark.slow
def test_the_perplexity_of_the_command_equals_numpy(tmp_path, capsys):
    tokens = write_text(tmp_path)
    flags = [
        f"--model_dir={tmp_path / 'run'}",
        f"--module_config.vocab_path={tmp_path / 'vocab.txt'}",
        "--module_config.seq_length=8",
        f"--module_config.model_config.hidden_size={H}",
        f"--module_config.model_config.memory_size={M}",
    ]
    training = [
        f"--train_pattern={tmp_path / 'text.txt'}",
        "--train_batch_size=2",
        "--train_consecutive=2",
        "--max_train_steps=20",
        "--check_every_steps=20",
        "--random_seed=3",
        "--steps_per_dispatch=1",
        "--noprogress",
        "--module_config.opt_config.optimizer=amos",
        "--module_config.opt_config.learning_rate=0.1",
        "--module_config.opt_config.momentum=0.0",
    ]
    assert main.main(["train", "lstm_lm", *flags, *training]) == 0
    capsys.readouterr()
    evaluation = [f"--eval_pattern={tmp_path / 'text.txt'}", "--eval_batch_size=1", "--json"]
    assert main.main(["eval", "lstm_lm", *flags, *evaluation]) == 0
    metrics = json.loads(capsys.readouterr().out)
    cost, perplexity, mrr = numpy_scores(store.load(tmp_path / "run")["model_params"], tokens)
    assert cost < math.log(V)
    assert metrics == {
        "step": 20,
        "cost": pytest.approx(cost, rel=1e-5),
        "perplexity": pytest.approx(perplexity, rel=1e-4),
        "mrr": pytest.approx(mrr, rel=1e-5),
    }


def test_consecutive_batches_are_one_long_sequence(variables, apply):
    tokens = np.random.default_rng(2).integers(0, V, (2, 12))
    expected, expected_variables = apply(with_rows(variables, 2), tokens, jnp.array([True, True]))
    logits, current = [], with_rows(variables, 2)
    for i, sequence in enumerate(np.split(tokens, 3, axis=1)):
        sequence_logits, changed = apply(current, sequence, jnp.array([i == 0, i == 0]))
        current = {**current, **changed}
        logits.append(sequence_logits)
    np.testing.assert_allclose(np.concatenate(logits, 1), expected, rtol=2e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5),
        current["carry"],
        expected_variables["carry"],
    )


def test_rows_marked_as_first_ignore_the_carry(variables, apply):
    tokens = np.random.default_rng(3).integers(0, V, (2, 4))
    fresh = with_rows(variables, 2)
    alone, _ = apply(fresh, tokens, jnp.array([True, True]))
    _, left = apply(fresh, tokens[:, ::-1], jnp.array([True, True]))
    mixed, _ = apply({**fresh, **left}, tokens, jnp.array([True, False]))
    np.testing.assert_array_equal(mixed[0], alone[0])
    assert not np.allclose(mixed[1], alone[1])


def test_without_is_first_only_a_single_evaluated_row_continues(variables, apply):
    tokens = np.random.default_rng(4).integers(0, V, (1, 4))
    alone, left = apply(variables, tokens)
    again = {**variables, **left}
    assert not np.allclose(apply(again, tokens)[0], alone)
    rows, _ = apply(with_rows(again, 2), np.repeat(tokens, 2, 0))
    np.testing.assert_allclose(rows[1], alone[0], rtol=1e-5, atol=1e-6)


def test_is_first_may_be_one_value_for_all_rows(variables, apply):
    tokens = np.random.default_rng(6).integers(0, V, (2, 4))
    fresh = with_rows(variables, 2)
    _, left = apply(fresh, tokens, jnp.array([True, True]))
    current = {**fresh, **left}
    for value in (True, False):
        by_scalar, _ = apply(current, tokens, np.bool_(value))
        by_row, _ = apply(current, tokens, jnp.array([value, value]))
        np.testing.assert_array_equal(by_scalar, by_row)


def test_the_memory_mask_is_drawn_once_per_sequence():
    size = 8
    model = lstm_lm.LstmLM(size, 0, size, size, FORGET, 0.0, 0.5)
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, size, (3, 6)))
    params = randomize(jax.jit(model.init)(jax.random.key(0), tokens)["params"])
    # With these parameters the logits are the memory readout.
    eye, zeros = jnp.eye(size), jnp.zeros(size)
    params = {**params, "embed": {"embedding": eye}, "bias": zeros}
    params["lstm"]["cell"]["out"] = {"kernel": eye, "bias": zeros}
    run = jax.jit(lambda *args: model.apply(*args, train=True, rngs=rngs, mutable=True))
    rngs = {"dropout": jax.random.key(1)}
    logits, _ = run({"params": params}, tokens)
    is_dropped = np.asarray(logits == 0)
    assert (is_dropped == is_dropped[:, :1]).all()
    assert 0 < is_dropped[:, 0].mean() < 1
    assert (is_dropped[0, 0] != is_dropped[1, 0]).any()


def test_dropout_is_active_in_training_only(variables, apply):
    tokens = np.array([[3, 1, 4, 1]])
    assert (apply(variables, tokens, rng=0)[0] == apply(variables, tokens, rng=1)[0]).all()
    first, second = (apply(variables, tokens, train=True, rng=i)[0] for i in (0, 1))
    assert (first != second).any()


def test_gradients_reach_every_parameter(model, variables):
    def value(params):
        logits, _ = model.apply(
            {**variables, "params": params}, jnp.array([[3, 1, 4]]), mutable=["carry"]
        )
        return jnp.sum(jnp.sin(logits))

    grads = jax.jit(jax.grad(value))(variables["params"])
    for name, grad in trees.flatten_named(grads).items():
        assert np.isfinite(grad).all(), name
        assert np.abs(grad).max() > 0, name


@pytest.mark.parametrize("n_parts", [1, 4])
def test_the_loss_is_the_same_with_accumulation(n_parts):
    config = small()
    config.model_config.update(hidden_dropout_rate=0.0, memory_dropout_rate=0.0)
    source = lstm_lm.open_data(config, "sample://split=valid", train=True)
    data = facts(source, 4)
    experiment = lstm_lm.experiment(config, data)
    fns = any_model.as_model_fns(experiment.model)
    batch = {**data.sample, "is_first": np.ones(4, bool)}
    params, variables = fns.init(jax.random.key(0), experiment.split(batch)[0])
    loss_of = objective.Objective(fns, experiment.loss, split=experiment.split)
    value = jax.jit(objective.make_value(loss_of, n_parts))
    loss = value(params, variables, batch, jax.random.key(1))
    # The output layer of a new model is zero: all 67 words are equally likely. The loss is the
    # sum over the tokens divided by the square root of their number.
    assert float(loss) == pytest.approx(4 * 8 * math.log(67) / math.sqrt(4 * 8), rel=1e-4)


def test_manual_scales_equal_those_of_jestimator():
    eta = amos_helper.params_fn_from_assign_map(lstm_lm.ETA, eval_str_value=True)
    h, m, v = 256, 1024, 10_001
    expected = {
        ("embed/embedding", (v, h)): 256**-0.25,
        ("lstm/normalize/shift", (2 * h,)): 0.5 * 256**-0.25,
        ("lstm/cell/core/kernel", (2 * h, 4, m)): 512**-0.25,
        ("lstm/cell/core/bias", (4, m)): 0.5,
        ("lstm/cell/normalize/shift", (m,)): 0.5,
        ("lstm/cell/out/kernel", (m, h)): (1024 * 256) ** -0.25,
        ("lstm/cell/out/bias", (h,)): 0.5 * 256**-0.25,
        ("bias", (v,)): 0.5,
    }
    for (name, shape), value in expected.items():
        assert eta(tuple(name.split("/")), shape) == pytest.approx(value), name


def amos_loop(**opt_config):
    config = small(optimizer="amos", learning_rate=0.05, momentum=0.0, beta=0.98, **opt_config)
    source = lstm_lm.open_data(config, "sample://split=valid", train=True)
    experiment = lstm_lm.experiment(config, facts(source, 8))
    data = consecutive(source, 8, 4)
    task = TrainTask(
        optimizer=experiment.make_optimizer(),
        loss=experiment.loss,
        data=data,
        split=experiment.split,
    )
    loop = TrainLoop(experiment.model, task, n_steps_per_checkpoint=20, steps_per_dispatch=1)
    return loop, source


def slot_sizes(loop):
    slots = trees.flatten_named(loop.state.opt_state)
    return {k.split("/v/")[-1]: v.size for k, v in slots.items() if "/v/" in k}


SLOT_SIZES = {
    "bias": 1,
    "embed/embedding": 67,
    "lstm/cell/core/bias": 1,
    "lstm/cell/core/kernel": 4 * M,
    "lstm/cell/normalize/shift": 1,
    "lstm/cell/out/bias": 1,
    "lstm/cell/out/kernel": H,
    "lstm/normalize/shift": 1,
}


@pytest.mark.slow
def test_training_with_manual_scales_learns_and_keeps_the_carry():
    loop, source = amos_loop()
    assert slot_sizes(loop) == SLOT_SIZES
    shapes = {k: v.shape for k, v in trees.flatten_named(loop.state.carry).items()}
    assert shapes == {"memory": (8, M), "prev": (8,), "recurrent": (8, H)}
    checkpoint = loop.next_step()
    batch = next(consecutive(source, 8, 4))
    np.testing.assert_array_equal(checkpoint.state.carry["prev"], batch["tokens"][:, -1])
    assert np.abs(checkpoint.state.carry["memory"]).max() > 0
    costs = [loop.next_checkpoint().metrics["train"]["cost"] for _ in range(2)]
    assert costs[1] < costs[0] < math.log(67)


@pytest.mark.slow
def test_training_can_use_found_scales(caplog):
    caplog.set_level(logging.INFO, "tekoa")
    loop, _ = amos_loop(scales="found")
    assert "Amos scales found for the model" in caplog.text
    assert "NOT PLACED" not in caplog.text
    assert slot_sizes(loop) == {**SLOT_SIZES, "lstm/cell/core/bias": 4}


@pytest.mark.slow
def test_auto_learns_although_the_recurrence_could_amplify_gradients():
    """With its kernels on their scales, gradients grow 1.2 times per token and are noise."""
    config = small()
    config.seq_length = 64
    config.model_config.update(hidden_size=16, memory_size=32)
    source = lstm_lm.open_data(config, "sample://split=train", train=True)
    experiment = lstm_lm.experiment(config, facts(source, 16))
    task = TrainTask(
        optimizer=experiment.make_optimizer(),
        loss=experiment.loss,
        data=consecutive(source, 16, 8),
        split=experiment.split,
    )
    loop = TrainLoop(experiment.model, task, n_steps_per_checkpoint=40, n_steps=80)
    costs = [loop.next_checkpoint().metrics["train"]["cost"] for _ in range(2)]
    assert costs[1] < 3.0 < math.log(67)


def test_evaluation_rejects_several_rows():
    config = small()
    source = lstm_lm.open_data(config, "sample://split=valid", train=False)
    experiment = lstm_lm.experiment(config, facts(source, 2))
    batch = next(source.batches(2))
    for metric in experiment.metrics.values():
        with pytest.raises(DataError, match=r"2 rows: use --eval_batch_size=1"):
            metric(jnp.zeros((2, 8, 67)), batch)


def test_an_unknown_choice_of_scales_is_a_usage_error():
    config = small(optimizer="amos", scales="guess")
    source = lstm_lm.open_data(config, "sample://split=valid", train=True)
    with pytest.raises(UsageError, match="scales must be 'hand' or 'found', got 'guess'"):
        lstm_lm.experiment(config, facts(source, 2)).make_optimizer()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"model_config": {"hidden_size": 0}},
            "model_config.hidden_size must be 1 or more, got 0",
        ),
        (
            {"model_config": {"memory_dropout_rate": 1.0}},
            r"memory_dropout_rate must be in \[0, 1\), got 1.0",
        ),
        ({"opt_config": {"learning_rate": 0.1}}, "auto sets its own rates"),
    ],
)
def test_invalid_settings_are_usage_errors(setting, message):
    config = small()
    source = lstm_lm.open_data(config, "sample://split=valid", train=True)
    config.update(setting)
    with pytest.raises(UsageError, match=message):
        lstm_lm.experiment(config, facts(source, 2))
