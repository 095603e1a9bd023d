"""The code of objects of a model file."""

import functools
import importlib.util
import sys

import ml_collections
import pytest
from flax import linen as nn

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.ran import recorded_lines
from tekoa.estimator.eject.source import Code

HELPER = "import numpy\n\ndef half(x):\n    return numpy.square(x) / 2\n"
TEXT = '''"""A model."""
import math
import numpy as np, optax
import tekoa
import source_helper
from flax import linen as nn
from source_helper import half as one_half
from tekoa.estimator import DataFacts, UsageError
from tekoa.sharding import constrain

# The width.
WIDTH = 3


class Net(nn.Module):
    width: int = 2
    act: object = nn.relu

    def __call__(self, x):
        return self.act(x)


def helper(x: np.ndarray, width=WIDTH):
    if x is None:
        raise UsageError("None.")
    return constrain(math.sqrt(x), "batch") * one_half(width) + source_helper.half(x)


def uses(x):
    return USE


def make(config, scale):
    def loss(out, batch):
        return helper(out) * config.opt.rate / config["n"] + scale

    return loss, lambda batch: batch["x"] + config.n


def experiment(config, data):
    if config.n < 0:
        raise UsageError("No.")
    width = config.n + 1
    other = make(config, 2)
    net = Net(width)
    return dict(model=net, loss=other)


def check(x):
    """Checks x."""
    if x < 0:
        raise ValueError


def checked(x):
    check(x)
    return x
'''


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    monkeypatch.syspath_prepend(tmp_path)
    use = getattr(request, "param", "1")
    for name, text in {"source_helper": HELPER, "some_model": TEXT.replace("USE", use)}.items():
        (tmp_path / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[name])
    return sys.modules["some_model"]


CONFIG = ml_collections.ConfigDict({"n": 7, "opt": {"rate": 0.5}})


def test_a_function_comes_with_what_it_uses(module):
    code = Code(module)
    assert code.call(functools.partial(module.helper, width=5), "x", "f") == "helper(x, width=5)"
    assert [*code.blocks] == ["WIDTH", "UsageError", "half", "helper"]
    assert code.blocks["WIDTH"] == "# The width.\nWIDTH = 3"
    assert "def helper(x, width=WIDTH)" in code.blocks["helper"]
    assert "half(width) + half(x)" in code.blocks["helper"]
    assert {*code.imports} == {"import math", "import numpy"}


def test_settings_of_inner_functions_become_numbers(module):
    code, (loss, inputs) = Code(module), module.make(CONFIG, 2)
    assert code.call(loss, "out, batch", "loss") == "loss(out, batch)"
    assert "return helper(out) * 0.5 / 7 + scale" in code.blocks["loss"]
    assert code.blocks["scale"] == "scale = 2"
    assert code.call(inputs, "batch", "inputs") == "inputs(batch)"
    assert code.blocks["inputs"] == 'def inputs(batch):\n    return batch["x"] + 7'


def test_linen_module_is_its_constructor(module):
    code = Code(module)
    assert code.expression(module.Net(5, nn.silu)) == "Net(width=5, act=nn.silu)"
    assert code.expression(module.Net()) == "Net()"
    assert code.blocks["Net"].startswith("class Net(nn.Module):\n    width: int = 2")


def test_other_values(module):
    assert Code(module).expression((1, "a", {"b": None})) == "(1, 'a', {'b': None})"
    assert Code(module).expression(CONFIG) == "Config(n=7, opt=Config(rate=0.5))"
    with pytest.raises(UsageError, match="type object cannot be written"):
        Code(module).expression(object())


def test_a_name_without_a_definition_is_refused(module):
    module.missing = 1
    with pytest.raises(UsageError, match="'missing' was not found"):
        Code(module).add_definition(module, "missing")


def test_statements_that_an_argument_needs(module):
    statements = Code(module).assignment(module.experiment, "model", (CONFIG, None))
    assert statements == "width = 7 + 1\nnet = Net(width)\nmodel = net"


@pytest.mark.parametrize("module", ["tekoa.scales", "tekoa.data.load", "tekoa.amos"], indirect=True)
def test_other_names_of_tekoa_are_refused(module):
    with pytest.raises(UsageError, match=r"some_model\.py: '[a-z_]+' of Tekoa"):
        Code(module).expression(module.uses)


def test_two_meanings_of_a_name_are_refused(module):
    code = Code(module)
    code.call(module.make(CONFIG, 2)[0], "x", "f")
    with pytest.raises(UsageError, match="'scale' would mean two things"):
        code.call(module.make(CONFIG, 3)[0], "x", "f")


def test_a_check_that_passed_is_left_out(module):
    with recorded_lines(lambda path: path == module.__file__) as ran:
        module.checked(1)
    code = Code(module, ran)
    code.add_definition(module, "checked")
    assert [*code.blocks] == ["checked"]
    assert "check(x)" not in code.blocks["checked"]
    code = Code(module)
    code.add_definition(module, "checked")
    assert [*code.blocks] == ["check", "checked"]
