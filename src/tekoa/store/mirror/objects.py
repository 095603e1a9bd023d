"""The objects of a run directory in a store: read, conditional put, upload, list, delete.

fsspec's file systems move the bytes; only the conditional put is a request of each store's own.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator

from tekoa import _extras
from tekoa.core import messages
from tekoa.store import errors
from tekoa.store.mirror import urls, versions

_N_PARALLEL = 8


class Objects:
    """The objects whose names begin with a URL.

    Args:
        url: The URL of a run directory; see `urls.clean_url`.

    Attributes:
        url: The URL in its one form.

    Raises:
        MissingPackageError: If the package for this kind of store is not installed.
    """

    def __init__(self, url: str | os.PathLike[str]):
        self.url = urls.clean_url(url)
        scheme, _, self._path = self.url.partition("://")
        fsspec = _extras.require("fsspec", extra="cloud", what=f"Using {self.url}")
        package = {"s3": "s3fs", "gs": "gcsfs"}.get(scheme)
        if package is not None:
            _extras.require(package, extra="cloud", what=f"Using {self.url}")
            messages.quiet_log(package)
        with _reported(self.url):
            self._store = fsspec.filesystem(scheme, use_listings_cache=False)
        self._versions = versions.of_store(scheme, self._store)
        if scheme == "memory":
            self._path = f"/{self._path}"

    def at(self, name: str) -> str:
        """Returns the URL of an object, for messages."""
        return f"{self.url}/{name}"

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Returns the bytes and the version of a small object; None if it does not exist."""
        with _reported(self.at(name)):
            try:
                return self._versions.read(f"{self._path}/{name}")
            except FileNotFoundError:
                return None

    def put(self, name: str, data: bytes, *, replaces: str) -> str:
        """Writes a small object in one piece and returns its version.

        Args:
            name: Its name.
            data: Its bytes.
            replaces: The version that it replaces; `versions.ABSENT` to create it.

        Raises:
            ConflictError: If it has another version by now; nothing is changed then.
        """
        with _reported(self.at(name)):
            return self._versions.put(f"{self._path}/{name}", data, replaces)

    def upload(self, sources: dict[str, pathlib.Path | bytes], on_file: Callable[[], None]) -> None:
        """Writes objects from files or bytes, several at once; `on_file` is called after each.

        After the first error no other upload is started.
        """
        failed = threading.Event()

        def one(item: tuple[str, pathlib.Path | bytes]) -> None:
            if failed.is_set():
                return
            name, source = item
            try:
                with _reported(self.at(name)):
                    if isinstance(source, bytes):
                        self._store.pipe_file(f"{self._path}/{name}", source)
                    else:
                        self._store.put_file(str(source), f"{self._path}/{name}")
                on_file()
            except BaseException:
                failed.set()
                raise

        with concurrent.futures.ThreadPoolExecutor(_N_PARALLEL, "tekoa-upload") as pool:
            for _ in pool.map(one, sources.items()):
                pass

    def download(self, name: str) -> bytes | None:
        """Returns the bytes of an object; None if it does not exist."""
        with _reported(self.at(name)):
            try:
                return self._store.cat_file(f"{self._path}/{name}")
            except FileNotFoundError:
                return None

    def download_to(self, name: str, path: pathlib.Path) -> bool:
        """Writes the bytes of an object to a file; returns whether it exists."""
        with _reported(self.at(name)):
            try:
                self._store.get_file(f"{self._path}/{name}", str(path))
                return True
            except FileNotFoundError:
                return False

    def names_in(self, folder: str) -> list[str]:
        """Lists the names of all objects in a folder and below."""
        with _reported(self.at(folder)):
            self._store.invalidate_cache()
            paths = self._store.find(f"{self._path}/{folder}")
        return [str(path)[len(self._path) + 1 :] for path in paths]

    def folders(self) -> list[str]:
        """Lists the names of the folders at the top."""
        with _reported(self.url):
            self._store.invalidate_cache()
            try:
                entries = self._store.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
        folders = [str(entry["name"]) for entry in entries if entry["type"] == "directory"]
        return [path.rstrip("/").rpartition("/")[2] for path in folders]

    def delete(self, names: Iterable[str], on_file: Callable[[], None] = lambda: None) -> None:
        """Deletes objects; those that are gone already are skipped."""
        for name in names:
            with _reported(self.at(name)), contextlib.suppress(FileNotFoundError):
                self._store.rm_file(f"{self._path}/{name}")
            on_file()


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turns the errors of a store into ours; each store has its own."""
    try:
        yield
    except (errors.StoreError, _extras.MissingPackageError):
        raise
    except Exception as error:
        text = str(error) or type(error).__name__
        raise errors.UnreachableError(
            f"{what}: {type(error).__name__}: {text.rstrip('.')}. Check the name, the network and "
            "the credentials."
        ) from error
