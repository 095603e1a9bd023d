"""`tekoa scales MODEL --check`: the picture, the verdict, and a real probe at several widths."""

import math
import re

import pytest

from tekoa.estimator.cli import main
from tekoa.estimator.modes import basin

MODEL = """
import ml_collections
import numpy as np
from flax import linen as nn

from tekoa.estimator import Experiment


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(self.width)(x)))


def get_config():
    return ml_collections.ConfigDict(SETTINGS)


def open_data(settings, pattern, train):
    x = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
    return {"x": x, "y": np.abs(x[:, :1])}


def experiment(config, data):
    return Experiment(
        model=Net(config.get("width", 16)),
        # With a metric besides, as in the bundled language models.
        loss=lambda y, batch: (((y - batch["y"]) ** 2).mean(), {"size": (y**2).mean()}),
        optimizer="auto",
        inputs=lambda batch: batch["x"],
    )
"""


def check(tmp_path, capsys, text):
    (tmp_path / "net.py").write_text(text)
    code = main.main(["scales", str(tmp_path / "net.py"), "--check", "--train_pattern=any"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_the_losses_around_the_default_are_drawn_at_three_widths(tmp_path, capsys):
    out = check(tmp_path, capsys, MODEL.replace("SETTINGS", "{'width': 32}"))
    assert re.findall(r"^width=(\d+):$", out, re.MULTILINE) == ["8", "16", "32"]
    assert len(re.findall(r"^  x (0\.25|0\.5|1|2|4) +loss [\d.e-]+", out, re.MULTILINE)) == 15
    assert len(re.findall(r"^  x 1 .* the default$", out, re.MULTILINE)) == 3
    assert "The default is" in out.splitlines()[-1]


def test_a_model_without_a_width_is_checked_as_it_is(tmp_path, capsys):
    out = check(tmp_path, capsys, MODEL.replace("SETTINGS", ""))
    assert out.startswith("The model as it is:\n  x 0.25")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({0.5: 2.0, 1.0: 1.04, 2.0: 1.0}, True),
        ({0.5: 2.0, 1.0: 1.06, 2.0: 1.0}, False),
        ({0.5: 1.0, 1.0: math.inf, 2.0: math.inf}, False),
        ({0.5: -1.0, 1.0: -2.0, 2.0: -2.05}, True),
    ],
)
def test_the_default_may_be_a_little_worse_than_the_best(losses, expected):
    assert basin.is_in_basin(losses) is expected


def test_a_run_that_diverges_has_no_bar():
    lines = basin.picture({0.5: math.inf, 1.0: 2.0})
    assert lines[0] == "  x 0.5   diverged"
