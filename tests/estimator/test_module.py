import sys

import optax
import pytest

from tekoa.estimator import module
from tekoa.estimator.config import UsageError


def test_models_are_found_by_name_module_and_file(tmp_path, monkeypatch):
    assert module.load_module("mnist").__name__ == "tekoa.models.mnist"
    (tmp_path / "my_model.py").write_text("X = 1\n")
    assert module.load_module(str(tmp_path / "my_model.py")).X == 1
    monkeypatch.syspath_prepend(tmp_path)
    assert module.load_module("my_model").X == 1
    sys.modules.pop("my_model")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, ["Which model"]),
        ("mnits", ["mnits", "'mnist'"]),
        ("no/such.py", ["no/such.py"]),
        ("no.such.module", ["no.such.module"]),
    ],
)
def test_missing_models_are_named(name, words):
    with pytest.raises(UsageError) as error:
        module.load_module(name)
    for word in words:
        assert word in str(error.value)


def test_an_error_inside_a_model_file_is_not_hidden(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_thing_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        module.load_module(str(tmp_path / "broken.py"))


def test_an_experiment_may_leave_its_optimizer_for_later():
    made = []
    fields = {"model": None, "loss": None, "inputs": lambda batch: batch["x"]}
    late = module.Experiment(**fields, optimizer=lambda: made.append(1) or optax.sgd(0.1))
    assert not made
    assert isinstance(late.make_optimizer(), optax.GradientTransformation)
    tx = optax.sgd(0.1)
    assert module.Experiment(**fields, optimizer=tx).make_optimizer() is tx
    assert late.split({"x": 1}) == ((1,), ({"x": 1},))
