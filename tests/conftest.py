"""Fixtures of all tests."""

import gc
import signal

import jax
import pytest

from support import figures


def pytest_collection_finish():
    """Collects garbage less often, and never looks at imported modules again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def _hangups():
    """Under nohup SIGHUP is ignored, and programs that the tests start would inherit that."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """The command caches compiled programs: not among the user's own files here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory):
    """Many tests compile the very same step: XLA does it once."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def figure(request):
    """Records the figures of a fault test, or compares them with the record."""
    return figures.Figure(request.node, is_recording=request.config.option.record_figures)
