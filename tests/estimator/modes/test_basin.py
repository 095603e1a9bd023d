"""`tekoa scales MODEL --check`: the picture, the verdict, and a real probe at several widths."""

import html
import math
import re

import pytest

import tekoa
from tekoa.estimator.cli import main
from tekoa.estimator.modes import basin
from tekoa.estimator.report import facts, page

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
    flags = ["--check", "--train_pattern=any", f"--model_dir={tmp_path / 'run'}"]
    code = main.main(["scales", str(tmp_path / "net.py"), *flags])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.mark.slow
def test_the_losses_around_the_default_are_drawn_at_three_widths(tmp_path, capsys):
    out = check(tmp_path, capsys, MODEL.replace("SETTINGS", "{'width': 32}"))
    assert re.findall(r"^width=(\d+):$", out, re.MULTILINE) == ["8", "16", "32"]
    assert len(re.findall(r"^  x (0\.25|0\.5|1|2|4) +loss [\d.e-]+", out, re.MULTILINE)) == 15
    assert len(re.findall(r"^  x 1 .* the default$", out, re.MULTILINE)) == 3
    assert "The default is" in out.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_width_is_checked_as_it_is(tmp_path, capsys):
    out = check(tmp_path, capsys, MODEL.replace("SETTINGS", ""))
    assert out.startswith("The model as it is:\n  x 0.25")


def test_the_page_of_a_run_shows_the_check(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    picture, link = check(tmp_path, capsys, MODEL.replace("SETTINGS", "")).split("The page of ")
    assert str(run) in link
    assert html.escape(picture.rstrip()) in page.render(facts.gather(run))


@pytest.mark.parametrize("metrics", [(), ({"size": 1.0},)], ids=["alone", "with metrics"])
def test_a_loss_that_is_a_total_and_a_count_stays_both(metrics):
    mean = tekoa.Mean(6.0, 3.0)
    assert basin._value_of(lambda *_: (mean, *metrics) if metrics else mean, 1, 2) is mean


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({0.5: 2.0, 1.0: 1.04, 2.0: 1.0}, True),
        ({0.5: 2.0, 1.0: 1.06, 2.0: 1.0}, False),
        ({0.5: 1.1, 1.0: 1.2, 2.0: 1.0}, True),
        ({0.5: 1.0, 1.0: math.inf, 2.0: math.inf}, False),
        ({0.5: -1.0, 1.0: -2.0, 2.0: -2.05}, True),
    ],
)
def test_the_default_may_be_a_little_worse_than_the_best(losses, expected):
    assert basin.is_in_basin(losses) is expected


def test_a_run_that_diverges_has_no_bar():
    lines = basin.picture({0.5: math.inf, 1.0: 2.0})
    assert lines[0] == "  x 0.5   diverged"
