"""Which part of a model file is ejected."""

import importlib.util
import pathlib

import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.source import ModelFiles
from tekoa.estimator.eject.watch import Watch

TEXT = '''"""A model."""
import math
import numpy as np, optax
import tekoa
from tekoa.estimator import Experiment, DataFacts
from tekoa.sharding import constrain

DEFAULTS = {"train_pattern": "x"}
# The width.
WIDTH = 3


def open_data(config, pattern, train):
    return tekoa.data.load(pattern)


def helper(x):
    return constrain(math.sqrt(x), "batch") * WIDTH


def experiment(config, data: DataFacts):
    check = print(config)
    return Experiment(
        loss=helper,
        model=tekoa.Mean(config["n"], USE),
        optimizer="sgd",
        inputs=helper,
        metrics={"a": open_data},
    )
'''


def read(tmp_path, text):
    path = tmp_path / "some_model.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("some_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config, data = {"n": 7}, object()
    with Watch([str(path)]) as watch:
        module.helper(4.0)
        module.experiment(config, data)
    return ModelFiles(module).read(["experiment"], watch, settings=(config, data))


def test_only_what_training_needs_is_kept(tmp_path, capsys):
    source = read(tmp_path, TEXT.replace("USE", "1"))
    assert source.imports == ("import math",)
    assert source.stand_ins == ('Mean = collections.namedtuple("Mean", "total count")',)
    assert source.definitions == {
        "WIDTH": "# The width.\nWIDTH = 3",
        "helper": "def helper(x):\n    return math.sqrt(x) * WIDTH",
        "experiment": "def experiment():\n    return Experiment("
        'loss=helper, model=Mean(7, 1), optimizer="sgd", inputs=helper)',
    }


@pytest.mark.parametrize("use", ["tekoa.scales", "tekoa.data.load"])
def test_other_names_of_tekoa_are_refused(use, tmp_path):
    with pytest.raises(UsageError, match=r"some_model\.py: '[a-z.]+' of Tekoa"):
        read(tmp_path, TEXT.replace("USE", use))


def test_name_of_the_file_is_that_of_the_model():
    assert pathlib.Path(ModelFiles(pathlib).main.__file__).exists()
