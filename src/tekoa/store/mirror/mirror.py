"""Run directories at URLs: opened for writing by `mirrored`, for reading by `fetched`."""

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Literal

from tekoa import hosts
from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import together
from tekoa.store.mirror import fetch
from tekoa.store.mirror import head as head_lib
from tekoa.store.mirror.objects import Objects
from tekoa.store.mirror.publisher import Publisher
from tekoa.store.mirror.urls import clean_url
from tekoa.store.mirror.urls import is_url as is_url
from tekoa.store.mirror.view import View

_log = logging.getLogger("tekoa.store")
# A best checkpoint of an evaluator is three levels below the directory of its run.
_N_PARENTS = 4
_publishers: dict[str, Publisher] = {}
_views: dict[str, View] = {}


@contextlib.contextmanager
def mirrored(
    directory: str | os.PathLike[str], *, grace_seconds: float = 60.0
) -> Iterator[pathlib.Path]:
    """Opens a run directory in an object store for writing, as a local working copy.

    Everything that is written to the working copy is published whenever a checkpoint is committed
    there, and at the end. Extensions and stores receive the local path. Local directories are
    returned as they are.

    Args:
        directory: A URL (`s3://BUCKET/PATH`, `gs://BUCKET/PATH`, `memory://PATH`) or a path.
        grace_seconds: How long to wait for the last publication.

    Yields:
        The local directory. It has the contents of the directory in the store.

    Raises:
        errors.LeaseHeldError: If another process is writing to the directory.
        errors.SaveFailedError: At the end, if the last state could not be published.
        errors.StoreError: If the store cannot be used.

    >>> with mirrored('memory://docs/run') as directory:
    ...     _ = (directory / 'notes.txt').write_text('all of it')
    >>> (fetched('memory://docs/run') / 'notes.txt').read_text()
    'all of it'
    """
    if not is_url(directory):
        yield files.local_path(directory)
        return
    group, url = hosts.current(), clean_url(directory)
    if group.count > 1 and url.startswith("memory:"):
        raise errors.StoreError(
            f"{url}: memory:// is part of one process, but {group.count} train together. Use a "
            "directory, s3:// or gs://."
        )
    publisher: Publisher | None = None

    def begin() -> str:
        nonlocal publisher
        publisher = _publishers[url] = Publisher(url)
        return str(publisher.directory)

    path = pathlib.Path(together.run_on_writer(group, f"opening of {url}", begin))
    try:
        _check_shared(group, path)
        yield path
    except BaseException as error:
        if publisher is not None:
            _close_after(error, publisher, grace_seconds)
        raise
    else:
        together.run_on_writer(
            group,
            f"publication to {url}",
            lambda: None if publisher is None else publisher.close(grace_seconds),
        )
    finally:
        _publishers.pop(url, None)


def _close_after(error: BaseException, publisher: Publisher, grace_seconds: float) -> None:
    """Publishes the last state; the error that ended the program is the one to raise."""
    try:
        publisher.close(grace_seconds)
    except errors.StoreError as failure:
        if str(failure) != str(error):
            _log.error("%s", failure)


def _check_shared(group: hosts.Hosts, path: pathlib.Path) -> None:
    """Raises if the processes do not see the same working copy."""

    def check(exists: list[bool]) -> None:
        if not all(exists):
            raise errors.StoreError(
                f"Process {exists.index(False)} does not see {path}, the working copy of process "
                "0. Set XDG_CACHE_HOME to a directory that all machines share."
            )

    if group.count > 1:
        together.run_on_all(group, "search for the working copy", path.is_dir, check)


def fetched(
    url: str | os.PathLike[str], *, steps: Literal["newest", "all", "none"] = "newest"
) -> pathlib.Path:
    """Returns a local copy of a run directory in an object store, of one of its steps or folders.

    The copy is that of one moment and is removed when the program ends. Local paths are returned
    as they are.

    Args:
        url: The URL, or a path.
        steps: Which steps are downloaded completely: the newest valid one, all or none. Of the
            others only the manifest and the index are. If the URL is that of a step, it is
            downloaded completely.

    Returns:
        The local path. It does not exist if there is nothing at the URL.

    Raises:
        errors.StoreError: If the store cannot be read.

    >>> fetched('runs/mnist')
    PosixPath('runs/mnist')
    """
    if not is_url(url):
        return files.local_path(url)
    clean = clean_url(url)
    for root, publisher in _publishers.items():
        if clean == root or clean.startswith(f"{root}/"):  # Written by this process.
            path = publisher.directory / clean[len(root) + 1 :]
            publisher.fetch_step(path)
            return path
    root = _outermost(clean)
    view = _views[root] = _views.get(root) or View(root)
    view.refresh()
    name = clean[len(view.url) + 1 :]
    if head_lib.step_of(f"{name}/x") == name or steps == "newest":
        view.complete(name)
    elif steps == "all":
        view.complete_all(name)
    return view.directory / name if name else view.directory


def refresh(directory: pathlib.Path) -> None:
    """Brings the local copy of a run directory up to date; does nothing for other directories.

    If the store does not answer, the copy stays as it is.
    """
    for view in _views.values():
        if directory == view.directory:
            view.try_refresh()


def complete(path: pathlib.Path) -> None:
    """Downloads a step, or the newest valid step of a directory, into a local copy.

    Does nothing for other directories.
    """
    for view in _views.values():
        if path.is_relative_to(view.directory):
            view.complete(path.relative_to(view.directory).as_posix().removeprefix("."))


def shown(path: str | os.PathLike[str]) -> str:
    """Returns the URL of a local copy, for messages; the path itself if it is none."""
    path = pathlib.Path(path)
    for url, copy in (*_publishers.items(), *_views.items()):
        if path.is_relative_to(copy.directory):
            name = path.relative_to(copy.directory).as_posix()
            return url if name == "." else f"{url}/{name}"
    return str(path)


def _outermost(url: str) -> str:
    """Returns the directory of the run that a URL is in; the URL itself if there is none."""
    scheme, _, path = url.partition("://")
    parts = path.split("/")
    n_least = max(len(parts) - _N_PARENTS, 1 if scheme == "memory" else 2)
    for n in range(n_least, len(parts)):
        candidate = f"{scheme}://{'/'.join(parts[:n])}"
        if fetch.read_head(Objects(candidate)) is not None:
            return candidate
    return url
