"""Versions of objects, and the put that replaces one version only: a request of each store's own.

Object stores have no rename, but the put of one object is atomic, and it can depend on the version
of the object that it replaces. The fence and the lease build on this.
"""

import hashlib
import threading
from typing import Any, Protocol, cast

from tekoa.store import errors

# The version of an object that does not exist.
ABSENT = ""
_memory_lock = threading.Lock()


class ConflictError(errors.StoreError):
    """An object has another version than the one that a put should replace."""


class Versions(Protocol):
    """Small objects with versions; paths begin with the bucket."""

    def read(self, path: str) -> tuple[bytes, str]:
        """Returns the bytes and the version of an object, or raises FileNotFoundError."""
        ...

    def put(self, path: str, data: bytes, replaces: str) -> str:
        """Writes an object and returns its version, or raises ConflictError."""
        ...


def of_store(scheme: str, store: Any) -> Versions:
    """Returns the versions of the objects in a file system of fsspec."""
    return {"s3": _S3, "gs": _Google, "memory": _Memory}[scheme](store)


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
            if isinstance(error, FileNotFoundError):
                if _s3_code(error) == "NoSuchBucket":
                    raise FileNotFoundError(f"the bucket {bucket!r} does not exist") from None
                if replaces:
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
        except FileNotFoundError:
            raise FileNotFoundError(f"the bucket {bucket!r} does not exist") from None
        except FileExistsError:  # What gcsfs makes of status 412, a condition that does not hold.
            raise ConflictError(f"gs://{path} was changed by another writer.") from None
        return str(info["generation"])
