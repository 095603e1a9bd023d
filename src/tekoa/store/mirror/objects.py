"""The objects of a run directory in a store: read, conditional put, upload, list, delete.

Object stores have no rename, but a put of one object is atomic, and it can depend on the version
of the object that it replaces. This is all that the rest of the folder builds on. fsspec's file
systems move the bytes; only the conditional put is a request of each store's own.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from tekoa import _extras
from tekoa.core import files
from tekoa.store import errors

SCHEMES = ("gs", "s3", "memory")
# The version of an object that does not exist.
ABSENT = ""
# `pathlib` shortens '//' to '/'.
_URL = re.compile(rf"({'|'.join(SCHEMES)}):/+([^?*\[\]]+)", re.IGNORECASE)
_N_PARALLEL = 8
_memory_lock = threading.Lock()
T = TypeVar("T")


class ConflictError(errors.StoreError):
    """An object has another version than the one that a put should replace."""


def is_url(path: str | os.PathLike[str] | None) -> bool:
    """Returns whether a path is a URL of an object store.

    >>> is_url('s3://bucket/run'), is_url('runs/s3'), is_url(None)
    (True, False, False)
    """
    return path is not None and _URL.match(os.fspath(path)) is not None


def clean_url(url: str | os.PathLike[str]) -> str:
    """Returns a URL in its one form: lower-case scheme, no slash at the end.

    Raises:
        files.PathError: If it has no name in the bucket, or contains '..' or a wildcard.

    >>> clean_url('S3://bucket/runs/a/')
    's3://bucket/runs/a'
    """
    text = os.fspath(url)
    match = _URL.fullmatch(text)
    parts = [] if match is None else [part for part in match[2].split("/") if part]
    if match is None or not parts or {".", ".."} & {*parts} or "\0" in text:
        raise files.PathError(
            f"{text!r} cannot be a run directory. Use a URL such as s3://BUCKET/runs/NAME, "
            "without '?', '*', '[' and '..'."
        )
    scheme = match[1].lower()
    if scheme != "memory" and len(parts) < 2:
        raise files.PathError(
            f"{text!r} is a complete bucket. Name a directory in it, such as {text}/NAME."
        )
    return f"{scheme}://{'/'.join(parts)}"


class Objects:
    """The objects whose names begin with a URL.

    Args:
        url: The URL of a run directory; see `clean_url`.

    Attributes:
        url: The URL in its one form.

    Raises:
        MissingPackageError: If the package for this kind of store is not installed.
    """

    def __init__(self, url: str | os.PathLike[str]):
        self.url = clean_url(url)
        scheme, _, self._path = self.url.partition("://")
        fsspec = _extras.require("fsspec", extra="cloud", what=f"Using {self.url}")
        package = {"s3": "s3fs", "gs": "gcsfs"}.get(scheme)
        if package is not None:
            _extras.require(package, extra="cloud", what=f"Using {self.url}")
        with _reported(self.url):
            self._store = fsspec.filesystem(scheme, use_listings_cache=False)
        self._versioned: _S3 | _Google | _Memory
        self._versioned = {"s3": _S3, "gs": _Google, "memory": _Memory}[scheme](self._store)
        if scheme == "memory":
            self._path = f"/{self._path}"

    def at(self, name: str) -> str:
        """Returns the URL of an object, for messages."""
        return f"{self.url}/{name}"

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Returns the bytes and the version of a small object; None if it does not exist."""
        with _reported(self.at(name)):
            try:
                return self._versioned.read(f"{self._path}/{name}")
            except FileNotFoundError:
                return None

    def put(self, name: str, data: bytes, *, replaces: str) -> str:
        """Writes a small object in one piece and returns its version.

        Args:
            name: Its name.
            data: Its bytes.
            replaces: The version that it replaces; `ABSENT` to create it.

        Raises:
            ConflictError: If it has another version by now; nothing is changed then.
        """
        with _reported(self.at(name)):
            return self._versioned.put(f"{self._path}/{name}", data, replaces)

    def upload(self, sources: dict[str, pathlib.Path | bytes], on_file: Callable[[], None]) -> None:
        """Writes objects from files or bytes, several at once; `on_file` is called after each."""

        def one(item: tuple[str, pathlib.Path | bytes]) -> None:
            name, source = item
            with _reported(self.at(name)):
                if isinstance(source, bytes):
                    self._store.pipe_file(f"{self._path}/{name}", source)
                else:
                    self._store.put_file(str(source), f"{self._path}/{name}")
            on_file()

        _in_parallel(one, sources.items())

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


def _in_parallel(work: Callable[[T], None], items: Iterable[T]) -> None:
    with concurrent.futures.ThreadPoolExecutor(_N_PARALLEL, "tekoa-upload") as pool:
        for future in [pool.submit(work, item) for item in items]:
            future.result()


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


class _Memory:
    """Versions of objects in the memory of this process: digests of their bytes."""

    def __init__(self, store: Any):
        self._store = store

    def read(self, path: str) -> tuple[bytes, str]:
        data = self._store.cat_file(path)
        return data, hashlib.sha256(data).hexdigest()

    def put(self, path: str, data: bytes, replaces: str) -> str:
        with _memory_lock:
            try:
                version = self.read(path)[1]
            except FileNotFoundError:
                version = ABSENT
            if version != replaces:
                raise ConflictError(f"memory:/{path} was changed by another writer.")
            self._store.pipe_file(path, data)
            return hashlib.sha256(data).hexdigest()


class _S3:
    """Versions of objects in S3 and compatible stores: entity tags."""

    def __init__(self, store: Any):
        self._store = store

    def read(self, path: str) -> tuple[bytes, str]:
        from fsspec import asyn

        bucket, _, key = path.partition("/")

        async def get() -> tuple[bytes, str]:
            answer = await self._store._call_s3("get_object", Bucket=bucket, Key=key)
            async with answer["Body"] as body:
                return await body.read(), answer["ETag"]

        return cast(tuple[bytes, str], asyn.sync(self._store.loop, get))

    def put(self, path: str, data: bytes, replaces: str) -> str:
        bucket, _, key = path.partition("/")
        condition = {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
        try:
            answer = self._store.call_s3(
                "put_object", Bucket=bucket, Key=key, Body=data, **condition
            )
        except Exception as error:
            if _s3_code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412"):
                raise ConflictError(f"s3://{path} was changed by another writer.") from None
            if replaces and isinstance(error, FileNotFoundError):
                raise ConflictError(f"s3://{path} was deleted.") from None
            raise
        return answer["ETag"]


def _s3_code(error: BaseException) -> str:
    """Returns the code of an answer of S3; s3fs translates it to errors of Python."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        cause = cause.__cause__
    return ""


class _Google:
    """Versions of objects in Google Cloud Storage: generation numbers."""

    def __init__(self, store: Any):
        self._store = store

    def read(self, path: str) -> tuple[bytes, str]:
        bucket, _, key = path.partition("/")
        while True:
            info = self._store.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
            version = str(info["generation"])
            try:
                _, data = self._store.call(
                    "GET", "b/{}/o/{}", bucket, key, alt="media", generation=version
                )
            except FileNotFoundError:
                continue  # Replaced in between: without versioning the old bytes are gone.
            return bytes(data), version

    def put(self, path: str, data: bytes, replaces: str) -> str:
        bucket, _, key = path.partition("/")
        try:
            info = self._store.call(
                "POST",
                f"{self._store._location}/upload/storage/v1/b/{bucket}/o",
                uploadType="media",
                name=key,
                ifGenerationMatch=replaces or "0",
                data=data,
                json_out=True,
            )
        except Exception as error:
            if str(getattr(error, "code", "")) == "412":
                raise ConflictError(f"gs://{path} was changed by another writer.") from None
            raise
        return str(info["generation"])
