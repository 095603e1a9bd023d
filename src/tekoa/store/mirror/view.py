"""A local copy of a run directory in an object store, for reading while a writer may change it."""

import contextlib
import logging
import pathlib
from collections.abc import Callable

from tekoa.store import errors
from tekoa.store.commit import durable, paths
from tekoa.store.mirror import fetch, work_dirs
from tekoa.store.mirror import head as head_lib
from tekoa.store.mirror.head import Head
from tekoa.store.mirror.objects import Objects

_log = logging.getLogger("tekoa.store")
_N_TRIES = 20


class View:
    """A local copy of a run directory in an object store, for reading.

    Directories in it with a head of their own, such as those of evaluators, are included.

    Args:
        url: The URL of the run.
        directory: Where the copy is; by default a new directory.

    Attributes:
        url: The URL of the run.
        directory: The copy; it exists if the run does.
    """

    def __init__(self, url: str, directory: pathlib.Path | None = None):
        self._objects = Objects(url)
        self.url = self._objects.url
        self.directory = directory or work_dirs.of_reader(self.url)
        self._head = Head()
        self._inner: dict[str, View] = {}
        self._is_nested = directory is not None
        self._is_failing = False
        self._reported: set[str] = set()

    def refresh(self) -> None:
        """Downloads what has changed, and removes what is gone; steps only in part."""
        self._download(list, is_stale=True)
        if not self._is_nested:
            self._refresh_inner()

    def try_refresh(self) -> None:
        """As `refresh`; if the store does not answer, that is reported once."""
        try:
            self.refresh()
        except errors.UnreachableError as error:
            if not self._is_failing:
                _log.warning("%s It is tried again.", error)
            self._is_failing = True
        else:
            if self._is_failing:
                _log.warning("%s: can be read again.", self.url)
            self._is_failing = False

    def complete(self, name: str = "") -> None:
        """Downloads a step, or the newest valid step of a directory, completely."""
        folder, _, rest = name.partition("/")
        if folder in self._inner:
            self._inner[folder].complete(rest)
        elif name and head_lib.step_of(f"{name}/x") == name:
            self._download(
                lambda: fetch.fetch_step(self._objects, self._head, self.directory, name)
            )
        else:
            self._download(
                lambda: fetch.fetch_newest(self._objects, self._head, self.directory, name)
            )

    def complete_all(self, name: str = "") -> None:
        """Downloads all steps of a directory."""
        for step in paths.list_steps(self.directory / name):
            self.complete(paths.step_dir(name or ".", step).as_posix())

    def _download(self, download: Callable[[], list[str]], *, is_stale: bool = False) -> None:
        """Downloads; again, if objects are missing because there is a new head by now."""
        for _ in range(_N_TRIES):
            problems: list[str] = []
            if is_stale:
                self._follow_head()
                names = fetch.small_files(self._head)
                damage = fetch.fetch_files(self._objects, self._head, self.directory, names)
                problems = list(damage.values())
            problems += download()
            is_stale = bool(problems) and self._is_outdated()
            if not is_stale:
                fetch.report(line for line in problems if line not in self._reported)
                self._reported |= {*problems}
                return
        raise errors.StepGoneError(
            f"{self.url}: was changed while it was read, {_N_TRIES} times. Try again."
        )

    def _is_outdated(self) -> bool:
        head, _ = fetch.read_head(self._objects) or (Head(), "")
        return head.id != self._head.id

    def _follow_head(self) -> None:
        """Reads the present head, and removes what is not in it."""
        head, _ = fetch.read_head(self._objects) or (Head(), "")
        for path in self._head.files.keys() - head.files.keys():
            self._unlink(self.directory / path)
        changed = {p for p, parts in self._head.files.items() if head.files.get(p) != parts}
        for step in {head_lib.step_of(path) for path in changed} - {None}:
            # Gone, or replaced by another one of the same number.
            durable.remove(self.directory / f"{step}")
        self._head = head

    def _unlink(self, path: pathlib.Path) -> None:
        """Removes a file, and the directories that are empty without it."""
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # Not empty.
            for folder in path.parents:
                folder.rmdir()

    def _refresh_inner(self) -> None:
        for folder in self._objects.folders():
            if folder == head_lib.FOLDER or head_lib.step_of(f"{folder}/x"):
                continue
            if folder not in self._inner:
                inner = View(f"{self.url}/{folder}", self.directory / folder)
                if fetch.read_head(inner._objects) is None:
                    continue
                self._inner[folder] = inner
            self._inner[folder].refresh()
