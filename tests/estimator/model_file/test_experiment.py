import importlib.metadata
import sys

import optax
import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file import experiment


def test_models_are_found_by_name_module_and_file(tmp_path, monkeypatch):
    assert experiment.load_module("mnist").__name__ == "tekoa.models.mnist"
    (tmp_path / "my_model.py").write_text("X = 1\n")
    assert experiment.load_module(str(tmp_path / "my_model.py")).X == 1
    monkeypatch.syspath_prepend(tmp_path)
    assert experiment.load_module("my_model").X == 1
    sys.modules.pop("my_model")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, ["No model given"]),
        ("mnits", ["mnits", "'mnist'"]),
        ("no/such.py", ["no/such.py"]),
        ("no.such.module", ["no.such.module"]),
    ],
)
def test_a_missing_model_is_named(name, words):
    with pytest.raises(UsageError) as error:
        experiment.load_module(name)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import os\nimport no_such_package.part\n",
            r"line 2: No module named 'no_such_package'\. Install 'no_such_package'\.",
        ),
        ("from jestimator import amos\n", r"line 1: .*'jestimator'\. Set --compat=jestimator"),
        ("import os\nos.no_such_name\n", "line 2: AttributeError: .*no_such_name"),
        ("def broken(:\n", "line 1: invalid syntax"),
        ("import helper\n", r"helper\.py, line 2: ZeroDivisionError"),
    ],
)
def test_a_failing_import_is_one_message_with_file_and_line(tmp_path, monkeypatch, text, message):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper.py").write_text("X = 1\nY = X / 0\n")
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UsageError, match=rf"broken\.py.*cannot be imported\. .*{message}"):
        experiment.load_module(str(tmp_path / "broken.py"))
    with pytest.raises(UsageError, match=message):
        experiment.load_module("broken")


def test_a_missing_package_of_an_extra_is_installed_with_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "haiku", None)
    (tmp_path / "model.py").write_text("import haiku as hk\n")
    with pytest.raises(UsageError, match=r"line 1: .*pip install 'tekoa\[haiku\]'"):
        experiment.load_module(str(tmp_path / "model.py"))


def test_the_extras_for_model_files_exist():
    listed = importlib.metadata.metadata("tekoa").get_all("Provides-Extra")
    assert {*experiment._EXTRAS.values()} <= {*listed}


def test_the_optimizer_may_be_created_later():
    calls = []
    fields = {"model": None, "loss": None, "inputs": lambda batch: batch["x"]}
    late = experiment.Experiment(**fields, optimizer=lambda: calls.append(1) or optax.sgd(0.1))
    assert not calls
    assert isinstance(late.make_optimizer(), optax.GradientTransformation)
    tx = optax.sgd(0.1)
    assert experiment.Experiment(**fields, optimizer=tx).make_optimizer() is tx
    assert late.split({"x": 1}) == ((1,), ({"x": 1},))


@pytest.mark.parametrize(("n_examples", "n_batches"), [(100, 3.125), (8, 1.0), (None, 1.0)])
def test_the_number_of_batches_is_at_least_one(n_examples, n_batches):
    facts = experiment.DataFacts(info=None, n_examples=n_examples, batch_size=32, sample=None)
    assert facts.n_batches == n_batches


def test_a_model_file_may_import_the_files_beside_it(tmp_path):
    before = list(sys.path)
    (tmp_path / "beside_the_model.py").write_text("X = 1\n")
    (tmp_path / "model.py").write_text("from beside_the_model import X\n")
    assert experiment.load_module(str(tmp_path / "model.py")).X == 1
    sys.modules.pop("beside_the_model")
    assert sys.path == before
