"""Files of weights: safetensors in and out, numpy's npz and Orbax out."""

import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tekoa import _extras
from tekoa.core import trees
from tekoa.exchange import names
from tekoa.exchange.names import Naming, Weights
from tekoa.store import errors

SAFETENSORS = ".safetensors"


def is_weights_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a file of weights rather than a checkpoint.

    >>> is_weights_file('model.safetensors'), is_weights_file('runs/mnist')
    (True, False)
    """
    return os.fspath(path).endswith(SAFETENSORS)


def write_safetensors(path: pathlib.Path, weights: Weights, naming: Naming) -> None:
    """Writes weights as a safetensors file; it gets its name once it is complete.

    Raises:
        ValueError: If two weights get the same name.
    """
    library = _extras.require("safetensors.numpy", extra="safetensors", what=f"Writing {path}")
    arrays = {
        # Not `ascontiguousarray`, which adds an axis to scalars.
        name: np.asarray(array, order="C")
        for name, array in names.to_named(weights, naming).items()
    }
    # Hugging Face's loaders refuse files without this entry.
    metadata = {"format": "flax" if naming.label == "native" else "pt"}
    _replace(path, lambda part: library.save_file(arrays, part, metadata=metadata))


def read_safetensors(
    path: str | os.PathLike[str], target: Weights, namings: Iterable[Naming]
) -> tuple[dict[str, Any], str]:
    """Reads a safetensors file as trees for a model.

    The table of names is found by comparing the names in the file with those of the model.

    Args:
        path: The file.
        target: The model's own arrays or shapes, by item.
        namings: The tables to try.

    Returns:
        The arrays by item, with those that the model does not have under their own names; and the
        label of the table.

    Raises:
        errors.StoreError: If the file cannot be read.
    """
    library = _extras.require("safetensors.numpy", extra="safetensors", what=f"Reading {path}")
    safetensors = _extras.require("safetensors", extra="safetensors", what=f"Reading {path}")
    try:
        arrays = library.load_file(os.fspath(path))
    except FileNotFoundError:
        raise errors.StoreError(f"{path}: does not exist.") from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise errors.DamagedError(f"{path}: is not a safetensors file: {error}.") from None
    naming, prefix, _ = names.recognise(arrays, target, namings)
    return names.from_named(arrays, target, naming, prefix=prefix), naming.label


def write_numpy(path: pathlib.Path, weights: Weights, naming: Naming) -> None:
    """Writes weights as a compressed `.npz` file.

    Floats that numpy does not have, such as bfloat16, are written as float32.
    """
    arrays: dict[str, Any] = {k: _plain(x) for k, x in names.to_named(weights, naming).items()}

    def write(part: str) -> None:
        with open(part, "wb") as file:
            np.savez_compressed(file, **arrays)

    _replace(path, write)


def _plain(array: np.ndarray) -> np.ndarray:
    # Kind "V": dtypes of ml_dtypes, which `np.load` would not recognise.
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def write_orbax(path: pathlib.Path, weights: Weights) -> None:
    """Writes weights as an Orbax checkpoint, a directory that must not exist.

    Raises:
        FileExistsError: If there is something of this name.
    """
    ocp = _extras.require("orbax.checkpoint", extra="orbax", what=f"Writing {path}")
    if path.exists():
        raise FileExistsError(f"{path} exists. Remove it, or choose another name.")
    tree: Mapping[str, Any] = {
        "params": weights[names.PARAMS],
        **{name: tree for name, tree in weights[names.VARIABLES].items() if tree},
    }
    plain = trees.map_named(lambda _, leaf: trees.to_numpy(leaf), tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), plain)


def _replace(path: pathlib.Path, write: Callable[[str], None]) -> None:
    """Writes a file beside its final place, and moves it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = f"{path}.part"
    try:
        pathlib.Path(part).touch()
        mode = os.stat(part).st_mode
        write(part)
        # safetensors replaces the file by one that only its owner can read.
        os.chmod(part, mode)
        os.replace(part, path)
    finally:
        pathlib.Path(part).unlink(missing_ok=True)
