import json
import re

from tekoa.estimator.cli import main


def test_training_logs_aligned_lines_and_ends_with_the_validation(tmp_path, capsys):
    arguments = [f"--model_dir={tmp_path}", "--max_train_steps=30", "--check_every_steps=10"]
    assert main.main(["train", "linear_regression", *arguments, "--random_seed=1"]) == 0
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("step ")]
    pattern = r"step (..)/30  train loss \S+ +valid loss \S+ +\S+ steps/s  \S+ examples/s"
    steps = [match[1] for line in lines if (match := re.fullmatch(pattern, line))]
    assert steps == ["10", "20", "30"]
    assert len({line.index("valid") for line in lines[1:]}) == 1
    assert "valid_loss at step 30: " in printed.out


def test_every_check_is_a_line_of_json(tmp_path, capsys):
    arguments = [f"--model_dir={tmp_path}", "--max_train_steps=20", "--check_every_steps=10"]
    command = ["train", "linear_regression", *arguments, "--random_seed=1", "--json"]
    assert main.main([*command, "--noprogress"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [0, 10, 20]
    assert lines[2].keys() == {"step", "train_loss", "valid_loss"}
