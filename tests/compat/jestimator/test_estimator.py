import importlib
import re

import jax
import pytest

from tekoa.compat import jestimator
from tekoa.compat.jestimator import checkpoint_utils, estimator
from tekoa.estimator.cli import main


def test_modules_have_the_names_that_model_files_import(installed):
    for name, target in jestimator.MODULES.items():
        assert importlib.import_module(name) is importlib.import_module(target)
    jestimator.install()  # A second time.


def test_the_command_runs_an_unchanged_model_file(checkout, capsys):
    flags = ["--compat=jestimator", "--module_imp=jestimator.models.toy", "--train_batch_size=5"]
    flags += [f"--model_dir={checkout}/run"]
    train = ["--train_pattern=dummy://", "--max_train_steps=6", "--check_every_steps=3"]
    assert main.main([*flags, *train, "--noprogress", "--random_seed=1"]) == 0
    capsys.readouterr()
    assert main.main([*flags, "--eval_pattern=dummy://", "--eval_batch_size=4"]) == 0
    assert re.fullmatch(r"mse at step 6: 0\.\d+\n", capsys.readouterr().out)
    assert main.main([*flags, "--pred_pattern=dummy://", "--pred_batch_size=4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 20


def test_without_the_flag_the_message_names_it(tmp_path, capsys):
    (tmp_path / "model.py").write_text("from jestimator import amos\n")
    flags = [f"--module_imp={tmp_path}/model.py", "--train_pattern=a", f"--model_dir={tmp_path}"]
    assert main.main(flags) == 2
    error = capsys.readouterr().err
    assert "model.py, line 1: " in error
    assert "--compat=jestimator" in error
    assert "Traceback" not in error


@pytest.fixture
def flags(installed):
    estimator.FLAGS.mark_as_parsed()
    saved = estimator.FLAGS.flag_values_dict()
    yield estimator.FLAGS
    for name, value in saved.items():
        setattr(estimator.FLAGS, name, value)


def test_a_program_trains_resumes_evaluates_and_predicts(flags, installed, capsys):
    """The calls of JEstimator's own test of its linear regression."""
    toy = importlib.import_module("jestimator.models.toy")
    flags.model_dir = str(installed / "run")
    flags.module_config = toy.get_config()
    flags.train_pattern = flags.valid_pattern = flags.eval_pattern = "dummy://"
    flags.pred_pattern = ["dummy://"]
    for kind in ("train", "valid", "eval", "pred"):
        setattr(flags, f"{kind}_batch_size", 5)
    flags.check_every_steps, flags.max_train_steps, flags.progress = 2, 4, False
    config = toy.load_config(flags)
    partitioner = estimator.get_partitioner(config)
    rng = jax.random.PRNGKey(100)
    estimator.train(None, False, rng, toy, config, partitioner)
    path, same_dir = checkpoint_utils.latest_ckpt_path(flags.model_dir)
    assert (path, same_dir) == (str(installed / "run" / "checkpoint_4"), True)

    flags.max_train_steps = 6
    metrics = estimator.train(path, same_dir, rng, toy, config, partitioner)
    assert metrics.keys() >= {"train_loss", "valid_loss"}
    path, _ = checkpoint_utils.latest_ckpt_path(flags.model_dir)
    assert path == str(installed / "run" / "checkpoint_6")
    arguments = toy, config, partitioner
    once = estimator.eval_or_predict(path, estimator.RunMode.EVAL_ONCE, *arguments)
    flags.save_low = ["mse"]
    assert estimator.RunMode.EVAL_WAIT.is_eval
    capsys.readouterr()
    estimator.eval_or_predict(None, estimator.RunMode.EVAL_WAIT, *arguments)
    scores = {
        int(step): float(mse)
        for step, mse in re.findall(r"mse at step (\d+): (\S+)", capsys.readouterr().out)
    }
    assert scores[6] == pytest.approx(once["mse"], rel=1e-5)
    best, _ = checkpoint_utils.latest_ckpt_path(str(installed / "run/eval/low_mse"))
    assert best.endswith(f"checkpoint_{min(scores, key=scores.get)}")
    estimator.eval_or_predict(None, estimator.RunMode.PREDICT, *arguments)
    assert len(capsys.readouterr().out.splitlines()) == 20
