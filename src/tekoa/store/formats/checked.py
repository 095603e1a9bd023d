"""Checks the files of a step before anything reads them. Imports no JAX.

Every command uses these rules. The directory of a step may be a link, because steps are moved to
other disks; inside a step, links are not followed.
"""

import dataclasses
import math
import os
import pathlib
import stat
from typing import Any

from tekoa.core import files
from tekoa.store import errors
from tekoa.store.commit import durable, manifest, paths


def read_manifest(path: pathlib.Path) -> manifest.Manifest | None:
    """Reads the manifest of a step.

    Returns:
        None if the step has none, but may have been written by T5X.

    Raises:
        errors.DamagedError: If the manifest is damaged, or this is not a checkpoint at all.
        errors.NewerVersionError: If a later version of Tekoa wrote it.
    """
    try:
        return manifest.read(path)
    except FileNotFoundError:
        # Other programs write T5X steps without a manifest; all other steps must have one.
        if is_t5x(path) and not (path / paths.INDEX).exists():
            return None
        raise errors.DamagedError(
            f"{path}: has no manifest, so Tekoa did not commit it, and is not in T5X's format."
        ) from None


def check_files(
    path: pathlib.Path,
    sealed: manifest.Manifest | None,
    *,
    verify: manifest.Verify,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Checks the files of a step, by its manifest if it has one.

    Args:
        path: The directory of the step.
        sealed: The result of `read_manifest`.
        verify: How thoroughly to check the files.
        part: (index, count): check only every count-th file, starting with file `index`.

    Raises:
        errors.DamagedError: If a file is missing, damaged, a link, or something else.
    """
    _refuse_links(path)
    if sealed is not None:
        some_files = dict(list(sealed.files.items())[part[0] :: part[1]])
        manifest.check(path, dataclasses.replace(sealed, files=some_files), verify)
        if paths.parse_step(path.name) not in (None, sealed.step):
            raise errors.DamagedError(f"{path}: contains step {sealed.step}; it was renamed.")


def _refuse_links(path: pathlib.Path) -> None:
    for name, is_dir in durable.walk(path):
        mode = os.lstat(path / name).st_mode
        if stat.S_ISLNK(mode):
            raise errors.UnsafeError(f"{path / name}: is a link; links are not followed.")
        if not is_dir and not stat.S_ISREG(mode):
            raise errors.UnsafeError(f"{path / name}: is neither a file nor a directory.")


def is_t5x(path: pathlib.Path) -> bool:
    """Returns whether a directory looks like a step in T5X's format.

    Orbax and TensorFlow also write files named `checkpoint`; those are not T5X's.
    """
    file = path / paths.T5X
    if not file.is_file() or file.is_symlink() or (path / "_METADATA").exists():
        return False
    with files.open_regular(file) as opened:
        return opened.read(21) != b"model_checkpoint_path"


def read_index(directory: pathlib.Path) -> dict[str, Any]:
    """Reads the fields of a step's index (`formats.index.Index`); leaves are plain dicts.

    Raises:
        errors.DamagedError: If it is missing or unreadable.
    """
    path = directory / paths.INDEX
    failures = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    try:
        body = files.read_json(path, max_bytes=paths.MAX_INDEX_BYTES)
        if type(body["step"]) is not int or body["step"] < 0:
            raise ValueError(f"step {body['step']!r}")
        return {
            "step": body["step"],
            "leaves": [_leaf(*fields) for fields in body["leaves"]],
            "items": [str(item) for item in body["items"]],
            "meta": dict(body["meta"]),
            "metrics": {str(name): float(value) for name, value in body["metrics"].items()},
            "nodes": {tuple(map(str, name)): str(kind) for name, kind in body["nodes"]},
        }
    except PermissionError:
        raise  # This is no damage.
    except (*failures, RecursionError) as error:
        raise errors.DamagedError(f"{path}: the index is unreadable: {error!r}.") from error


def _leaf(name: Any, shape: Any, dtype: Any, kind: Any, detail: Any) -> dict[str, Any]:
    is_name = isinstance(name, list) and name and all(isinstance(part, str) for part in name)
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    is_shape = is_shape and math.prod(shape) < 2**63
    is_kind = kind in ("array", "key", "python") and isinstance(detail, str)
    if not (is_name and is_shape and is_kind and isinstance(dtype, str)):
        raise ValueError(f"leaf {str(name)[:40]!r} of shape {str(shape)[:40]}")
    fields = {"dtype": dtype, "kind": kind, "detail": detail}
    return {"name": tuple(name), "shape": tuple(shape), **fields}
