"""URLs of run directories. Imports little, because every command checks its flags with it."""

import os
import re

from tekoa.core import files

SCHEMES = ("gs", "s3", "memory")
# `pathlib` shortens '//' to '/'.
_URL = re.compile(rf"({'|'.join(SCHEMES)}):/+([^?*\[\]]+)", re.IGNORECASE)


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
