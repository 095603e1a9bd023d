import fsspec
import pytest

from tekoa.store.mirror import mirror, registry


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    mirror._views.clear()
    registry._observers.clear()


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


@pytest.fixture
def url(memory):
    return "memory://bucket/run"
