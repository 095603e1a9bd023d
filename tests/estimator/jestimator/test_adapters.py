import pathlib
import re

import numpy as np
import pytest

from tekoa import store
from tekoa.core import trees
from tekoa.estimator.cli import main
from tekoa.testing import assert_trees_equal

LONG = str(pathlib.Path(__file__).parents[1] / "long_model.py")
ADAPTERS = {("Dense_0", "kernel", "lora_a"), ("Dense_0", "kernel", "lora_b")}


def train(directory, *flags):
    flags = ("--train_pattern=dummy://", "--train_batch_size=10", "--max_train_steps=4", *flags)
    fixed = ("--check_every_steps=2", "--noprogress", "--random_seed=1")
    return main.main(["train", LONG, f"--model_dir={directory}", *fixed, *flags])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    assert train(directory) == 0
    return directory


def test_adapters_are_trained_validated_evaluated_and_predicted_with(base, tmp_path, capsys):
    lora = ["--lora_rank=1", "--lora_alpha=3", f"--lora_base={base}"]
    assert train(tmp_path, *lora, "--valid_pattern=dummy://") == 0
    printed = capsys.readouterr().out
    items = store.load(tmp_path)
    frozen = items["model_state"].pop("frozen")["Dense_0"]
    assert_trees_equal({"Dense_0": frozen}, store.load(base)["model_params"])
    assert set(trees.leaf_names(items["model_params"])) == ADAPTERS
    adapters = items["model_params"]["Dense_0"]["kernel"]
    assert np.any(adapters["lora_b"])

    # By hand: subtract the running mean, then multiply by W + alpha / rank * A B.
    rng = np.random.default_rng(2)
    x = rng.normal(size=(21, 3)).astype(np.float32) + 1
    y = x.sum(1) + 0.1 * rng.normal(size=21)
    kernel = frozen["kernel"] + 3 * adapters["lora_a"] @ adapters["lora_b"]
    outputs = (x - items["model_state"]["average"]["mean"]) @ kernel[:, 0] + frozen["bias"]
    mse = np.mean((outputs - y) ** 2)
    valid_loss = float(re.search(r"valid_loss at step 4: (\S+)", printed)[1])
    assert valid_loss == pytest.approx(mse, rel=1e-4)

    command = [LONG, f"--model_dir={tmp_path}"]
    assert main.main(["eval", *command, "--eval_pattern=dummy://", "--eval_batch_size=5"]) == 0
    printed = capsys.readouterr()
    assert "Using the settings of the run: lora_rank=1, lora_alpha=3.0." in printed.err
    assert float(re.search("mse at step 4: (.*)", printed.out)[1]) == pytest.approx(mse, rel=1e-4)
    assert main.main(["predict", *command, "--pred_pattern=dummy://", "--pred_batch_size=5"]) == 0
    lines = capsys.readouterr().out.split()[1:]
    np.testing.assert_allclose([float(line) for line in lines], outputs, atol=1e-4)


def test_adapters_resume_and_start_from_their_base(base, tmp_path):
    lora = ["--lora_rank=1", f"--lora_base={base}"]
    assert train(tmp_path / "whole", *lora) == 0
    assert train(tmp_path / "half", *lora, "--max_train_steps=2") == 0
    assert train(tmp_path / "half", *lora) == 0
    whole, half = (store.load(tmp_path / name) for name in ("whole", "half"))
    for item in ("model_params", "model_state", "optimizer_state"):
        assert_trees_equal(half[item], whole[item])


@pytest.mark.parametrize(
    "flags",
    [["--accumulate=2"], ["--precision=bf16"], ["--optimizer=lbfgs"], ["--optimizer=auto"]],
)
def test_other_flags_work_with_adapters(base, tmp_path, flags):
    assert train(tmp_path, "--lora_rank=1", f"--lora_base={base}", *flags) == 0
    items = store.load(tmp_path)
    assert set(trees.leaf_names(items["model_params"])) == ADAPTERS
    assert_trees_equal(items["model_state"]["frozen"], store.load(base)["model_params"])
    assert np.any(items["model_params"]["Dense_0"]["kernel"]["lora_b"])
