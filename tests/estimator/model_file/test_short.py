import itertools
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa import data, store
from tekoa.estimator.cli import flags as flags_lib
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file import experiment as experiment_lib
from tekoa.estimator.model_file.short import ShortProgram
from tekoa.estimator.run import run
from tekoa.hosts import signals
from tekoa.loop import train
from tekoa.testing import assert_trees_equal

TINY = str(pathlib.Path(__file__).parents[1] / "tiny_model.py")


def program(*flags, **functions):
    """A program for a model file with these functions."""

    def experiment(settings, facts):
        return experiment_lib.Experiment(
            model=nn.Dense(1),
            loss=lambda out, batch: ((out[:, 0] - batch["y"]) ** 2).mean(),
            optimizer=optax.sgd(0.1),
            inputs=lambda batch: batch["x"],
        )

    module = types.SimpleNamespace(__name__="my_model", **{"experiment": experiment, **functions})
    _, parsed = flags_lib.parse(list(flags))
    return ShortProgram(run.Run(config=parsed, module=module, settings=None, model_dir=None))


def open_numbers(settings, pattern, *, train):
    return data.as_source([{"x": np.float32([i]), "y": np.float32(i)} for i in range(10)])


def test_batches_report_the_first_of_a_consecutive_run():
    short = program(
        "--train_pattern=n", "--train_batch_size=2", "--train_consecutive=2", open_data=open_numbers
    )
    batches = short.train_batches(seed=0)
    first_four = [next(batches) for _ in range(4)]
    assert [batch["is_first"].tolist() for batch in first_four] == [[True] * 2, [False] * 2] * 2
    resumed = short.train_batches(seed=0)
    state = batches.state()
    expected = next(batches)
    resumed.restore(state)
    np.testing.assert_array_equal(next(resumed)["x"], expected["x"])


def test_missing_data_or_functions_are_named():
    with pytest.raises(UsageError, match="--eval_pattern"):
        program(open_data=open_numbers).evaluation()
    with pytest.raises(UsageError, match="no `metrics`"):
        program("--eval_pattern=n", open_data=open_numbers).evaluation()
    with pytest.raises(UsageError, match="no `predict`"):
        next(program("--pred_pattern=n", open_data=open_numbers).predictions("", None))


def counted_opens():
    """Returns an `open_data` that counts its calls, and the list of opened patterns."""
    patterns = []

    def open_data(settings, pattern, *, train):
        patterns.append(pattern)
        return open_numbers(settings, pattern, train=train)

    return open_data, patterns


def train_loop(short, **options):
    parts = short.train_parts(short.train_batches(seed=0), None)
    return train.TrainLoop(parts.model, parts.task, n_steps=5, steps_per_dispatch=1, **options)


def test_training_opens_its_data_once():
    open_data, patterns = counted_opens()
    short = program("--train_pattern=n", "--train_batch_size=2", open_data=open_data)
    list(train_loop(short, n_steps_per_checkpoint=5))
    short.sample("train")
    short.scales()
    assert patterns == ["n"]


@pytest.mark.parametrize("as_iterator", [False, True])
def test_training_streams_data_without_an_end(as_iterator):
    n_read = 0

    def numbers():
        nonlocal n_read
        for i in itertools.count():
            n_read += 1
            yield {"x": np.float32([i % 3]), "y": np.float32(i % 3)}

    def open_data(settings, pattern, *, train):
        return numbers() if as_iterator else numbers

    short = program("--train_pattern=n", "--train_batch_size=2", open_data=open_data)
    assert short.facts("train").n_examples is None
    assert [c.step for c in train_loop(short, n_steps_per_checkpoint=5)] == [5]
    assert n_read < 50


def test_a_model_that_needs_the_number_of_batches_gets_that_of_a_stream():
    def open_data(settings, pattern, *, train):
        return lambda: iter(list(open_numbers(settings, pattern, train=train)))

    short = program("--train_pattern=n", "--train_batch_size=2", open_data=open_data)
    assert short.facts("train").n_batches == 5


def test_evaluating_another_checkpoint_opens_and_traces_nothing():
    open_data, patterns = counted_opens()
    traces = []

    def error(out, batch):
        traces.append(1)
        return out[:, 0] - batch["y"]

    def experiment(settings, facts):
        return experiment_lib.Experiment(
            model=nn.Dense(1),
            loss=error,
            optimizer=optax.sgd(0.1),
            inputs=lambda batch: batch["x"],
            metrics={"error": error},
        )

    flags = ["--eval_pattern=n", "--eval_batch_size=5"]
    evaluate = program(*flags, open_data=open_data, experiment=experiment).evaluation()
    stop_flag = signals.StopFlag()
    first, n_traces = evaluate(None, stop_flag), len(traces)
    assert evaluate(None, stop_flag) == first
    assert len(traces) == n_traces
    assert patterns == ["n"]


@pytest.mark.parametrize("with_metrics", [False, True])
def test_the_reported_loss_is_the_mean_since_the_previous_check(with_metrics):
    """Five batches of the numbers 0 to 9; the model outputs 0 and does not learn."""

    def loss(out, batch):
        value = ((out[:, 0] - batch["y"]) ** 2).mean()
        return (value, {"rows": jnp.float32([2.0, 2.0])}) if with_metrics else value

    def experiment(settings, facts):
        return experiment_lib.Experiment(
            model=nn.Dense(1, kernel_init=nn.initializers.zeros),
            loss=loss,
            optimizer=optax.sgd(0.0),
            inputs=lambda batch: batch["x"],
        )

    short = program(
        "--train_pattern=n", "--train_batch_size=2", open_data=open_numbers, experiment=experiment
    )
    metrics = train_loop(short, n_steps_per_checkpoint=5).next_checkpoint().metrics["train"]
    assert metrics["loss"] == pytest.approx(np.mean(np.arange(10.0) ** 2))
    assert ("rows" in metrics) == with_metrics


@pytest.mark.slow
def test_adapters_of_any_model_file_are_trained_and_evaluated(tmp_path, capsys):
    base, adapted = tmp_path / "base", tmp_path / "adapted"
    assert main.main(["train", TINY, f"--model_dir={base}"]) == 0
    lora = ["--lora_rank=1", "--lora_alpha=3", f"--lora_base={base}"]
    assert main.main(["train", TINY, f"--model_dir={adapted}", *lora]) == 0
    items = store.load(adapted)
    weights = items["model_state"]["frozen"]
    assert_trees_equal(weights, store.load(base)["model_params"])
    adapters = items["model_params"]["Dense_0"]["kernel"]
    assert set(items["model_params"]) == {"Dense_0"}
    assert np.any(adapters["lora_b"])
    capsys.readouterr()
    assert main.main(["eval", TINY, f"--model_dir={adapted}", "--eval_pattern=a"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "Using the settings of the run: lora_rank=1, lora_alpha=3.0.\n"
    accuracy = float(printed.out.split(": ")[1])
    # The same by hand: normalise, then multiply by W + alpha / rank * A B.
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    stats, norm = items["model_state"]["batch_stats"]["BatchNorm_0"], weights["BatchNorm_0"]
    z = (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5) * norm["scale"] + norm["bias"]
    kernel = weights["Dense_0"]["kernel"] + 3 * adapters["lora_a"] @ adapters["lora_b"]
    logits = z @ kernel + weights["Dense_0"]["bias"]
    np.testing.assert_allclose(accuracy, np.mean(np.argmax(logits, -1) == (x.sum(1) > 0)))
    command = ["predict", TINY, f"--model_dir={adapted}", "--pred_pattern=a"]
    assert main.main(command) == 0
    predicted = [int(line) for line in capsys.readouterr().out.split()]
    np.testing.assert_array_equal(predicted, np.argmax(logits, -1))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora_rank=9"], "--lora_rank: rank=9 is too large"),
        (["--lora_where=kernel"], "--lora_where needs --lora_rank=N."),
        (["--lora_rank=1", "--param_groups=bias=freeze"], "No parameter is in group 'bias'"),
    ],
)
def test_adapters_that_cannot_apply_are_refused(tmp_path, capsys, flags, message):
    assert main.main(["train", TINY, f"--model_dir={tmp_path / 'run'}", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_adapters_of_the_bundled_cnn_need_an_optimizer_that_fits(tmp_path, capsys):
    flags = ["--lora_rank=1", "--module_config.optimizer=amos", "--dry_run"]
    command = ["train", "mnist", f"--model_dir={tmp_path}", *flags]
    assert main.main(command) == 2
    assert "the optimizer does not accept the adapters" in capsys.readouterr().err
    assert main.main([*command, "--lora_where=Dense.*kernel"]) == 2
    assert "Amos of the model has the scales of full weights" in capsys.readouterr().err
    assert main.main([*command, "--optimizer=adamw"]) == 0
    # Rows and columns of the four kernels, as matrices.
    n_numbers = (9 + 32) + (32 * 9 + 64) + (256 + 256) + (256 + 10)
    assert f"parameters: {n_numbers} in 8 arrays" in capsys.readouterr().out


def test_an_experiment_may_train_some_parameters_and_declare_its_reduction(tmp_path):
    def experiment(settings, facts):
        return experiment_lib.Experiment(
            model=nn.Dense(1),
            # Rows depend on each other: the parts of a batch could not be combined by themselves.
            loss=lambda out, batch: jnp.sum(out[:, 0] * batch["y"] * jnp.sign(jnp.sum(out) + 1e9)),
            optimizer=optax.sgd(0.1),
            inputs=lambda batch: batch["x"],
            metrics={"mean": lambda out, batch: jnp.mean(out)},
            trainable="bias",
            reduction="sum",
        )

    flags = ["--train_pattern=n", "--train_batch_size=10", "--eval_pattern=n", "--accumulate=2"]
    short = program(*flags, open_data=open_numbers, experiment=experiment)
    loop = train_loop(short, n_steps_per_checkpoint=1, accumulate=2)
    before = loop.state
    after = loop.next_checkpoint().state
    assert [leaf.shape for leaf in jax.tree.leaves(after.params)] == [(1,)]
    np.testing.assert_allclose(after.params["bias"], [-0.1 * np.arange(10).sum()], rtol=1e-6)
    assert_trees_equal(after.variables, before.variables)
    with store.Store(tmp_path) as directory:
        items = {"model_params": after.params, "model_state": after.variables}
        directory.save(1, items)
    metrics = short.evaluation()(str(tmp_path / "checkpoint_1"), signals.StopFlag())
    (kernel,) = (x for x in jax.tree.leaves(after.variables) if x.ndim == 2)
    assert metrics["mean"] == pytest.approx(float(4.5 * kernel[0, 0] + after.params["bias"][0]))


def test_adapters_and_trainable_exclude_each_other(tmp_path, capsys):
    model = tmp_path / "some.py"
    text = pathlib.Path(TINY).read_text()
    model.write_text(text.replace("loss=loss,", "loss=loss, trainable='bias',"))
    flags = [f"--model_dir={tmp_path}/run", "--lora_rank=1"]
    assert main.main(["train", str(model), *flags]) == 2
    assert "the model file chooses what is trained" in capsys.readouterr().err
