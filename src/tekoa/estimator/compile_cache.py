"""Compiled programs kept on disk: the second start of a job need not compile again.

It is JAX's own cache, in a directory of the user, and of this kind of processor: XLA runs
programs that were made for another one, and their last bits may differ. Where the cache
cannot be used the command says so and compiles.
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

OFF = "off"
MAX_BYTES = 2 * 10**9

_OPTIONS = {
    # Also what compiles quickly: a start has dozens of those.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_DIRECTORY = "jax_compilation_cache_dir"
_TROUBLE = "Error (reading|writing) persistent compilation cache"


@contextlib.contextmanager
def opened(wanted: str | None) -> Iterator[None]:
    """Keeps what the body of a `with` statement compiles.

    Args:
        wanted: A directory, "off", or None for the user's cache directory. None leaves a
            cache alone that JAX was given by its own settings.
    """
    if wanted == OFF or (wanted is None and getattr(jax.config, _DIRECTORY)):
        yield
        return
    try:
        where = default_dir() if wanted is None else pathlib.Path(wanted).expanduser()
        directory = where.absolute() / _processor()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        prune(directory)
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"{directory} cannot be written")
    except (OSError, RuntimeError) as error:  # The latter where there is no home.
        _say(f"Nothing compiled is kept: {error}. --compile_cache=DIR chooses another directory.")
        yield
        return
    with _settings({_DIRECTORY: str(directory), **_OPTIONS}), _healing(directory):
        yield


def default_dir() -> pathlib.Path:
    """The directory where a user's programs are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "tekoa" / "xla"


def prune(directory: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
    """Removes the oldest entries until the rest is small enough."""
    entries = [entry for entry in directory.iterdir() if entry.is_file()]
    entries.sort(key=lambda entry: entry.stat().st_mtime)
    n_bytes = sum(entry.stat().st_size for entry in entries)
    for entry in entries:
        if n_bytes <= max_bytes:
            return
        n_bytes -= entry.stat().st_size
        entry.unlink()


def _processor() -> str:
    """A name for this kind of processor: what it is called, and what it can do."""
    facts = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        first, *_ = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")
        kinds = ("model name", "flags", "Features", "CPU part")
        facts += [line for line in first.splitlines() if line.startswith(kinds)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _settings(wanted: dict[str, Any]) -> Iterator[None]:
    """Gives JAX other settings for a while; its cache looks at them only when it is opened."""
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _healing(directory: pathlib.Path) -> Iterator[None]:
    """Turns JAX's warnings about its cache into a line, and removes what is damaged."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_TROUBLE)
        show, told = warnings.showwarning, set()

        def look(message: Warning | str, *rest: Any) -> None:
            kind = "read" if str(message).startswith("Error reading") else "written"
            if not str(message).startswith(("Error reading", "Error writing")):
                show(message, *rest)
                return
            if kind == "read":
                # JAX never replaces an entry: the damaged one would stay for ever.
                _remove_damaged(directory)
            if kind not in told:
                told.add(kind)
                _say(
                    f"The compile cache {directory} could not be {kind}: what it lacks is compiled."
                )

        warnings.showwarning = look
        yield


def _remove_damaged(directory: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if not _is_whole(entry):
                entry.unlink(missing_ok=True)


def _is_whole(entry: pathlib.Path) -> bool:
    """Whether an entry is what JAX writes: its compression has a checksum."""
    try:
        zlib.decompress(entry.read_bytes())
    except zlib.error:
        return False  # Or in a format that cannot be checked here: it is compiled once more.
    return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
