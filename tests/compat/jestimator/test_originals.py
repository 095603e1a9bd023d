"""JEstimator's own files run, with other import lines and without any change.

They are not part of the project: without a checkout of JEstimator there is nothing to run. Where it
is can be set by TEKOA_JESTIMATOR.
"""

import importlib
import os
import pathlib
import re
import sys

import pytest

from support import tf_in_numpy
from support.processes import python
from tekoa.estimator.cli import main

SHARED = pathlib.Path(__file__).parents[4] / "shared"
CHECKOUT = pathlib.Path(os.environ.get("TEKOA_JESTIMATOR", SHARED / "originals" / "jestimator"))
MODELS = CHECKOUT / "jestimator" / "models"
PTB, MNIST = SHARED / "data" / "ptb", SHARED / "data" / "mnist"
# Modules of the originals, and where their names are now.
HOMES = {
    "jestimator": "tekoa.optim",
    "jestimator.data.pipeline_lm": "tekoa.data",
    "jestimator.data.pipeline_rec": "tekoa.data",
    "jestimator.data.reader": "tekoa.data",
    "jestimator.modeling": "tekoa.estimator.modeling",
    "jestimator.states": "tekoa.estimator",
    "flaxformer.components.dense": "tekoa.estimator.modeling",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not MODELS.is_dir(),
        reason="needs a checkout of JEstimator: set TEKOA_JESTIMATOR to its directory",
    ),
    # JEstimator's linear regression uses an old name.
    pytest.mark.filterwarnings("ignore:jax.* has been renamed"),
    pytest.mark.skipif(not MNIST.is_dir(), reason=f"no data in {MNIST.parent}"),
]


@pytest.fixture(params=["unchanged", "imports changed"])
def run_model(request, tmp_path, monkeypatch, capsys):
    """Returns a function that runs the command with a model of JEstimator."""
    for name, module in tf_in_numpy.modules(MNIST).items():
        monkeypatch.setitem(sys.modules, name, module)
    if request.param == "unchanged":
        monkeypatch.syspath_prepend(CHECKOUT)
    else:
        for path in MODELS.glob("*/*.py"):
            (tmp_path / "models" / path.parent.name).mkdir(parents=True, exist_ok=True)
            text = with_other_imports(path.read_text())
            (tmp_path / "models" / path.parent.name / path.name).write_text(text)
    importlib.invalidate_caches()
    before = set(sys.modules)

    def run(model, *flags):
        if request.param == "unchanged":
            module = f"jestimator.models.{model}"
            config = MODELS / f"{model.replace('.', '/')}.py"
            flags += ("--compat=jestimator", f"--module_imp={module}", f"--module_config={config}")
        else:
            flags += (f"--module_imp={tmp_path}/models/{model.replace('.', '/')}.py",)
        capsys.readouterr()
        assert main.main([*flags, f"--model_dir={tmp_path}/run", "--noprogress"]) == 0
        text = capsys.readouterr().out
        return {name: float(x) for name, x in re.findall(r"^(\w+) at step \d+: (\S+)$", text, re.M)}

    yield run
    forget(before)


def forget(before):
    """Removes the modules that a test imported under JEstimator's names."""
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("jestimator", "flaxformer", "modeling"):
            del sys.modules[name]


def with_other_imports(text):
    text = text.replace("from jestimator.models.lstm import modeling", "import modeling")
    for module, home in HOMES.items():
        text = re.sub(rf"^from {re.escape(module)} import", f"from {home} import", text, flags=re.M)
    return text


def test_mnist_learns_digits_and_the_best_checkpoint_is_kept(run_model, tmp_path):
    run_model(
        "mnist.mnist",
        "--train_pattern=tfds://mnist/split=train",
        "--train_batch_size=32",
        "--train_shuffle_buf=4096",
        "--max_train_steps=400",
        "--check_every_steps=200",
        "--module_config.warmup=100",
        "--random_seed=1",
    )
    metrics = run_model(
        "mnist.mnist",
        "--eval_pattern=tfds://mnist/split=test",
        "--eval_batch_size=100",
        "--num_eval_examples=2000",
        "--mode=eval_wait",
        "--check_ckpt_every_secs=1",
        "--save_high=test_accuracy",
    )
    assert metrics["test_accuracy"] > 0.9
    assert (tmp_path / "run/eval/high_test_accuracy/checkpoint_400").is_dir()


def test_lstm_language_model_learns_penn_treebank(run_model, tmp_path):
    lines = (PTB / "ptb.train.txt").read_text().splitlines(keepends=True)
    (tmp_path / "train.txt").write_text("".join(lines[:400]))
    (tmp_path / "valid.txt").write_text("".join(lines[400:440]))
    settings = {
        "vocab_path": PTB / "vocab.txt",
        "seq_length": 16,
        "model_config.hidden_size": 16,
        "model_config.memory_size": 16,
        "opt_config.optimizer": "amos",
        "opt_config.learning_rate": 0.1,
    }
    run_model(
        "lstm.lm",
        *(f"--module_config.{name}={value}" for name, value in settings.items()),
        f"--train_pattern={tmp_path}/train.txt",
        "--train_batch_size=16",
        "--train_consecutive=4",
        "--max_train_steps=20",
        "--check_every_steps=10",
        "--random_seed=1",
    )
    metrics = run_model(
        "lstm.lm", f"--eval_pattern={tmp_path}/valid.txt", "--eval_batch_size=1", "--mode=eval_once"
    )
    assert metrics.keys() == {"cost", "perplexity", "mrr"}
    assert metrics["cost"] < 8  # 9.21 for a model that knows nothing.


def test_linear_regression_trains_and_evaluates(run_model):
    batch = ("--train_batch_size=4", "--valid_batch_size=4", "--train_shuffle_buf=32")
    trained = run_model(
        "linear_regression.linear_regression",
        "--train_pattern=dummy://",
        "--valid_pattern=dummy://",
        *batch,
        "--max_train_steps=200",
        "--check_every_steps=10",
        "--random_seed=1",
    )
    evaluated = run_model(
        "linear_regression.linear_regression", "--eval_pattern=dummy://", "--eval_batch_size=4"
    )
    assert evaluated["mse"] == pytest.approx(trained["valid_loss"], rel=1e-5)


def test_the_test_of_linear_regression_passes(tmp_path):
    (tmp_path / "tensorflow.py").write_text(
        "import sys\nfrom support import tf_in_numpy\n"
        "sys.modules.update(tf_in_numpy.modules(None))\n"
    )
    search = [tmp_path, pathlib.Path(__file__).parents[2], CHECKOUT, *filter(None, sys.path)]
    process = python(
        "-m",
        "tekoa.compat.jestimator",
        "linear_regression_test.py",
        cwd=MODELS / "linear_regression",
        env={"PYTHONPATH": os.pathsep.join(map(str, search))},
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert "Ran 2 tests" in process.stderr
