"""A checkout of JEstimator with one model, whose own modules cannot be imported."""

import importlib
import pathlib
import sys

import pytest

from tekoa.compat import jestimator

# It imports `jestimator`, which exists only where the tests register it.
collect_ignore = ["toy_model.py"]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A directory on the path with `jestimator.models.toy`; its other modules must not be used."""
    models = tmp_path / "jestimator" / "models"
    models.mkdir(parents=True)
    text = pathlib.Path(__file__).with_name("toy_model.py").read_text()
    (models / "toy.py").write_text(text)
    for name in ("states", "amos", "estimator"):
        (models.parent / f"{name}.py").write_text("raise RuntimeError('the original')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("jestimator", "flaxformer"):
            del sys.modules[name]


@pytest.fixture
def installed(checkout):
    """The same, with the modules of `tekoa.compat.jestimator` registered."""
    jestimator.install()
    return checkout
