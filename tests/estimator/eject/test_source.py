"""Which part of a model file is ejected."""

import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.source import read_model

TEXT = '''"""A model."""
import math
import numpy as np, optax
import tekoa
from tekoa.estimator import Experiment, DataFacts
from tekoa.optim.amos_helper import params_fn_from_assign_map

DEFAULTS = {"train_pattern": "x"}
# The width.
WIDTH = 3


def open_data(config, pattern, train):
    return tekoa.data.load(pattern)


def helper(x):
    return math.sqrt(x) * WIDTH


@decorated
def experiment(config, data: DataFacts):
    return Experiment(loss=helper, optimizer=tekoa.amos(0.1, params_fn_from_assign_map({})))


def decorated(f):
    return f
'''


def test_only_what_training_needs_is_kept():
    source = read_model(TEXT, "model.py")
    assert source.imports == ("import math",)
    assert source.uses_amos
    assert source.stand_ins == (
        "DataFacts = types.SimpleNamespace",
        "Experiment = types.SimpleNamespace",
    )
    assert source.code.startswith("# The width.\nWIDTH = 3\n\n\ndef helper(x):")
    assert "@decorated\ndef experiment" in source.code
    assert "optimizer=amos(0.1" in source.code
    assert "open_data" not in source.code


@pytest.mark.parametrize("use", ["tekoa.scales(x)", "params_fn_from_assign_map2()", "tekoa"])
def test_other_names_of_tekoa_are_refused(use):
    imports = "import tekoa\nfrom tekoa import params_fn_from_assign_map2\n"
    text = f"{imports}\n\ndef experiment(config, data):\n    return {use}\n"
    with pytest.raises(UsageError, match=r"model\.py, line 6"):
        read_model(text, "model.py")


def test_arguments_that_the_ejected_amos_lacks_are_refused():
    text = TEXT.replace("({}))", "({}), beta=0.9, momentum=0.9)")
    with pytest.raises(UsageError, match=r"model\.py, line 23: Amos with momentum"):
        read_model(text, "model.py")
