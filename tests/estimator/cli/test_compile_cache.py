import contextlib
import os
import pathlib
import warnings
import zlib

import jax
import jax.numpy as jnp
import pytest

from tekoa import store
from tekoa.estimator.cli import compile_cache, main
from tekoa.testing import assert_trees_equal

TINY = str(pathlib.Path(__file__).parents[1] / "tiny_model.py")


@pytest.fixture(autouse=True)
def _no_other_cache():
    """Disables the cache that the test suite uses."""
    with compile_cache._jax_settings({"jax_compilation_cache_dir": None}):
        yield


@contextlib.contextmanager
def count_cache_events():
    """Counts hits and misses of JAX's cache."""
    events = []
    listen = lambda event, **_: events.append(event.removeprefix("/jax/compilation_cache/"))
    jax.monitoring.register_event_listener(listen)
    try:
        yield lambda: (events.count("cache_hits"), events.count("cache_misses"))
    finally:
        jax.monitoring.unregister_event_listener(listen)


def entries(directory):
    return [path for path in directory.rglob("*-cache") if path.is_file()]


def compiled_sum(n):
    """Runs a program that no other test compiles."""
    return float(jax.jit(lambda x: x.sum() * n)(jnp.ones(n)))


def test_second_start_uses_the_cache_and_computes_the_same_bits(tmp_path):
    counts = {}
    for name in ("first", "second", "without"):
        cache = "off" if name == "without" else tmp_path / "cache"
        flags = [f"--model_dir={tmp_path / name}", f"--compile_cache={cache}"]
        with count_cache_events() as count:
            assert main.main(["train", TINY, *flags]) == 0
            counts[name] = count()
    assert counts["first"][1] > 0
    assert counts["second"][1] == 0
    assert counts["second"][0] > 0
    assert counts["without"] == (0, 0)
    states = [store.load(tmp_path / name) for name in counts]
    assert_trees_equal(states[0], states[1])
    assert_trees_equal(states[0], states[2])


def test_jax_settings_are_restored(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    with compile_cache.enabled(str(tmp_path)):
        assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path))
    assert jax.config.jax_compilation_cache_dir == before


def test_cache_configured_in_jax_is_kept(tmp_path):
    with compile_cache.enabled(str(tmp_path / "own")):
        own = jax.config.jax_compilation_cache_dir
        with compile_cache.enabled(None):
            assert jax.config.jax_compilation_cache_dir == own


def test_damaged_entries_are_recompiled_and_replaced(tmp_path, capsys):
    with compile_cache.enabled(str(tmp_path)):
        expected = compiled_sum(7)
    good = entries(tmp_path)[0].with_name("good-cache")
    good.write_bytes(zlib.compress(b"another program"))
    for entry in set(entries(tmp_path)) - {good}:
        entry.write_bytes(entry.read_bytes()[:-20])
    with compile_cache.enabled(str(tmp_path)):
        assert compiled_sum(7) == expected
    assert capsys.readouterr().err.count("could not be read") == 1
    assert good.exists()
    with count_cache_events() as count, compile_cache.enabled(str(tmp_path)):
        assert compiled_sum(7) == expected
        assert count()[1] == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_unusable_directory_disables_the_cache(tmp_path, capsys, name):
    (tmp_path / "file").write_text("")
    with compile_cache.enabled(str(tmp_path / name)):
        assert compiled_sum(5) == 25
    assert "Compilation cache disabled" in capsys.readouterr().err


def test_directory_that_becomes_unwritable_is_reported_once(tmp_path, capsys):
    with compile_cache.enabled(str(tmp_path)):
        (directory,) = tmp_path.iterdir()
        directory.rmdir()
        directory.write_text("")
        assert compiled_sum(11) == 121
        assert compiled_sum(12) == 144
    err = capsys.readouterr().err
    assert 0 < err.count("could not be") == err.count("\n") <= 2


def test_other_warnings_are_shown(tmp_path):
    with (
        warnings.catch_warnings(record=True) as caught,
        compile_cache.enabled(str(tmp_path)),
    ):
        warnings.simplefilter("always")
        warnings.warn("look out", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["look out"]


def test_prune_removes_the_oldest_entries(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}-cache").write_bytes(bytes(10))
        os.utime(tmp_path / f"{i}-cache", (100 - i, 100 - i))
    compile_cache.prune(tmp_path, max_bytes=25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-cache", "1-cache"]


def test_prune_ignores_entries_that_another_process_removes_meanwhile(tmp_path, monkeypatch):
    for i in range(3):
        (tmp_path / f"{i}-cache").write_bytes(bytes(10))
    unlink = pathlib.Path.unlink

    def unlink_all(path, **options):
        for other in tmp_path.iterdir():
            unlink(other)
        unlink(path, **options)

    monkeypatch.setattr(pathlib.Path, "unlink", unlink_all)
    compile_cache.prune(tmp_path, max_bytes=0)
    assert not list(tmp_path.iterdir())


def test_default_is_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.default_dir() == tmp_path / "tekoa" / "xla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compile_cache.default_dir() == tmp_path / ".cache" / "tekoa" / "xla"


def test_missing_home_directory_disables_the_cache(monkeypatch, capsys):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with compile_cache.enabled(None):
        assert compiled_sum(3) == 9
    assert "Compilation cache disabled" in capsys.readouterr().err
