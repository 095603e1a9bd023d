import json
import pathlib

import pytest

from tekoa.estimator.cli import main


@pytest.fixture
def learns_as_written(tmp_path, monkeypatch, capsys):
    """Returns a function that writes a model file, then trains, evaluates and predicts with it."""

    def check(*flags):
        monkeypatch.chdir(tmp_path)
        assert main.main(["new", "own.py", *flags]) == 0
        short = ["--max_train_steps=60", "--check_every_steps=30", "--noprogress"]
        assert main.main(["train", "own.py", *short, "--random_seed=1"]) == 0
        capsys.readouterr()
        assert main.main(["eval", "own.py", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy"] > 0.7  # By chance it is 0.1.
        assert main.main(["predict", "own.py", "--pred_output=out.txt"]) == 0
        classes = pathlib.Path("out.txt").read_text().split()
        assert len(classes) == 360
        assert set(classes) <= set("0123456789")

    return check
