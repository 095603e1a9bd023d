import json

import pytest

from tekoa.estimator.cli import main
from tekoa.estimator.run import check_log
from tekoa.loop.checkpoint import Summary


def summary(**metrics):
    fields = dict.fromkeys(("state", "loss", "grads"))
    return Summary(
        **fields, step=20, n_completed_steps=10, elapsed_time=0.1, metrics={"train": metrics}
    )


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({}, ""),
        ({"gradients_l2norm": 1.0, "seconds_per_step": 0.1}, ""),
        ({"valid_loss": 0.25, "cost": 2.0, "loss": 0.5}, "0.5, cost: 2, valid_loss: 0.25"),
        ({"train_loss": 1 / 3, "weights_l2norm": 3.0}, "0.333333"),
    ],
)
def test_a_line_starts_with_the_loss_of_training(metrics, line):
    assert check_log.check_line(summary(**metrics)) == (line and f"train_loss at step 20: {line}")


def test_training_logs_each_check_and_ends_with_the_validation(tmp_path, capsys):
    arguments = [f"--model_dir={tmp_path}", "--max_train_steps=30", "--check_every_steps=10"]
    assert main.main(["train", "linear_regression", *arguments, "--random_seed=1"]) == 0
    printed = capsys.readouterr()
    steps = [line.split(":")[0] for line in printed.err.splitlines() if "train_loss at" in line]
    assert steps == [f"train_loss at step {n}" for n in (10, 20, 30)]
    assert "valid_loss at step 30: " in printed.out


def test_every_check_is_a_line_of_json(tmp_path, capsys):
    arguments = [f"--model_dir={tmp_path}", "--max_train_steps=20", "--check_every_steps=10"]
    command = ["train", "linear_regression", *arguments, "--random_seed=1", "--json"]
    assert main.main([*command, "--noprogress"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [0, 10, 20]
    assert lines[2].keys() == {"step", "train_loss", "valid_loss"}
