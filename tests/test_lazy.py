"""Names are imported when they are first used, and written once, in the stub."""

import subprocess
import sys

import pytest

from tekoa import _lazy

STUB = """
from pack import inner as inner
from pack.inner import thing as thing
from pack.deeper import module as module
"""


@pytest.fixture
def pack(tmp_path, monkeypatch):
    root = tmp_path / "pack"
    (root / "deeper").mkdir(parents=True)
    (root / "__init__.py").write_text(
        "from tekoa import _lazy\n"
        "__getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)\n"
    )
    (root / "__init__.pyi").write_text(STUB)
    (root / "inner.py").write_text("thing = 7\n")
    (root / "deeper" / "__init__.py").write_text("")
    (root / "deeper" / "module.py").write_text("name = 'deep'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def run(code):
        subprocess.run([sys.executable, "-c", code], check=True)

    return run


def test_nothing_is_imported_before_it_is_used(pack):
    pack("import sys, pack; assert 'pack.inner' not in sys.modules")


def test_names_modules_and_nested_modules_are_importable(pack):
    pack("import pack; assert (pack.thing, pack.inner.thing, pack.module.name) == (7, 7, 'deep')")


def test_all_and_dir_list_the_stub(pack):
    pack("import pack; assert pack.__all__ == dir(pack) == ['inner', 'module', 'thing']")


def test_an_unknown_name_is_an_attribute_error():
    load, _, _ = _lazy.attach("tekoa.models", __import__("tekoa.models").models.__file__)
    with pytest.raises(AttributeError, match=r"'tekoa\.models' has no attribute 'no_such_name'"):
        load("no_such_name")
