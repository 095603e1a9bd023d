"""JAX's compilation cache, so that a job that is started again does not compile again.

Each kind of processor has its own directory: XLA would run programs compiled for another
processor, and their last bits may differ. If the cache cannot be used, the command prints a
line and compiles.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from tekoa.core import files

OFF = "off"
MAX_BYTES = 2 * 10**9

_OPTIONS = {
    # Programs that compile quickly are cached too: every start compiles dozens of them.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_DIRECTORY = "jax_compilation_cache_dir"


@contextlib.contextmanager
def enabled(cache: str | None) -> Iterator[None]:
    """Caches all programs compiled in the body of a `with` statement.

    Args:
        cache: A directory, "off", or None for the cache that JAX is configured to use or,
            if there is none, the user's cache directory.
    """
    if cache == OFF or (cache is None and getattr(jax.config, _DIRECTORY)):
        yield
        return
    try:
        root = default_dir() if cache is None else files.local_path(cache)
        directory = root.absolute() / _processor_id()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        prune(directory)
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"{directory} is not writable")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory.
        _warn(f"Compilation cache disabled: {error}. Set another one with --compile_cache=DIR.")
        yield
        return
    with _jax_settings({_DIRECTORY: str(directory), **_OPTIONS}), _repairing(directory):
        yield


def default_dir() -> pathlib.Path:
    """Returns the cache directory of the user."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "tekoa" / "xla"


def prune(directory: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
    """Removes the oldest entries until the rest occupy at most `max_bytes`.

    JAX's own limit (`jax_compilation_cache_max_size`) needs the package filelock, locks the
    cache at every read and fails on entries written without the limit.
    """
    entries = []
    for entry in _entries(directory):
        with contextlib.suppress(FileNotFoundError):  # Another process prunes it too.
            status = entry.stat()
            entries.append((status.st_mtime, status.st_size, entry))
    n_bytes = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if n_bytes <= max_bytes:
            return
        n_bytes -= size
        entry.unlink(missing_ok=True)


def _processor_id() -> str:
    """Returns a hash of the name and the features of this machine's processor."""
    facts = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        first, *_ = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")
        kinds = ("model name", "flags", "Features", "CPU part")
        facts += [line for line in first.splitlines() if line.startswith(kinds)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _jax_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Changes JAX settings temporarily; its cache reads them only when it is opened."""
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _repairing(directory: pathlib.Path) -> Iterator[None]:
    """Replaces JAX's warnings about its cache by one line, and removes damaged entries."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "always", message="Error (reading|writing) persistent compilation cache"
        )
        show_other, reported = warnings.showwarning, set()

        def show(message: Warning | str, *rest: Any) -> None:
            if not str(message).startswith(("Error reading", "Error writing")):
                show_other(message, *rest)
                return
            action = "read" if str(message).startswith("Error reading") else "written"
            if action == "read":
                # JAX never replaces an entry: a damaged one would stay forever.
                _remove_damaged(directory)
            if action not in reported:
                reported.add(action)
                _warn(f"Compilation cache {directory} could not be {action}; compiling instead.")

        warnings.showwarning = show
        yield


def _entries(directory: pathlib.Path) -> list[pathlib.Path]:
    """Lists the files written by JAX; links and other files of the user are left alone."""
    return [
        entry
        for entry in directory.iterdir()
        if entry.name.endswith("-cache") and entry.is_file() and not entry.is_symlink()
    ]


def _remove_damaged(directory: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        for entry in _entries(directory):
            try:
                zlib.decompress(entry.read_bytes())
            except zlib.error:  # Also raised for another kind of compression.
                entry.unlink(missing_ok=True)


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
