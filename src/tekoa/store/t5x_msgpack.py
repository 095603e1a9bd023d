"""The msgpack file of a T5X checkpoint: nested maps with small arrays inside.

Arrays are ExtType 1 with `(shape, dtype name, bytes)`, complex numbers ExtType 2,
numpy scalars ExtType 3; arrays above `MAX_CHUNK_BYTES` are maps of flat pieces. The
bytes are those that Flax's serialization makes.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import ml_dtypes
import numpy as np

from tekoa.store import errors

MAX_CHUNK_BYTES = 2**30

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_MAX_DEPTH = 100


def pack(tree: Any) -> bytes:
    """Encodes nested dicts of numpy arrays, numbers, strings and None."""
    import msgpack

    data = msgpack.packb(_split_large(tree), default=_encode, strict_types=True)
    return cast(bytes, data)  # None is for a packer that is fed in parts.


def unpack(data: bytes, where: str) -> Any:
    """Decodes what `pack` or Flax made.

    Args:
        data: The file's bytes.
        where: The file's name, for messages.

    Raises:
        errors.DamagedError: If the bytes are cut or not of this format. Nothing is
            allocated beyond the size of `data`.
    """
    import msgpack

    def decode(code: int, payload: bytes) -> Any:
        return _decode(code, payload, where)

    try:
        tree = msgpack.unpackb(data, ext_hook=decode, strict_map_key=False, raw=False)
    except errors.DamagedError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise errors.DamagedError(f"{where}: is not a msgpack checkpoint: {error!r}.") from error
    return _join_large(tree, where, depth=0)


def _encode(value: Any) -> Any:
    import msgpack

    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, _array_bytes(np.asarray(value)))
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, _array_bytes(value))
    if isinstance(value, complex):
        return msgpack.ExtType(_COMPLEX, msgpack.packb((value.real, value.imag)))
    raise TypeError(f"A T5X checkpoint cannot hold a {type(value).__name__}.")


def _array_bytes(array: np.ndarray) -> bytes:
    import msgpack

    # Little endian and C order, whatever the array is.
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = msgpack.packb((array.shape, array.dtype.name, array.tobytes("C")), use_bin_type=True)
    return cast(bytes, data)


def _decode(code: int, payload: bytes, where: str) -> Any:
    import msgpack

    if code == _COMPLEX:
        return complex(*msgpack.unpackb(payload))
    if code not in (_ARRAY, _SCALAR):
        raise errors.DamagedError(f"{where}: holds an unknown msgpack type {code}.")
    shape, name, data = msgpack.unpackb(payload, use_list=False, raw=False)
    dtype = to_dtype(name, where)
    if not _is_shape(shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise errors.DamagedError(
            f"{where}: an array is said to be {name}{list(shape)} and has {len(data)} bytes."
        )
    # Copied, since arrays over msgpack's bytes could not be written to.
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    return array[()] if code == _SCALAR else array


def to_dtype(name: Any, where: str) -> np.dtype:
    """Gives the dtype of a name found in a checkpoint; numbers only, never objects.

    Raises:
        errors.DamagedError: If there is no such dtype.
    """
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.name != name or dtype.kind not in "biufcV" or dtype.type is np.void:
        raise errors.DamagedError(f"{where}: {name!r} is not a dtype of numbers.")
    return dtype


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape
    )


def _split_large(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _split_large(value) for key, value in tree.items()}
    if not isinstance(tree, np.ndarray) or tree.nbytes <= MAX_CHUNK_BYTES:
        return tree
    flat = tree.reshape(-1)
    n = max(1, int(MAX_CHUNK_BYTES / tree.itemsize))
    chunks = [flat[i : i + n] for i in range(0, flat.size, n)]
    return {
        _CHUNKED: True,
        "shape": {str(i): size for i, size in enumerate(tree.shape)},
        "chunks": {str(i): chunk for i, chunk in enumerate(chunks)},
    }


def _join_large(tree: Any, where: str, depth: int) -> Any:
    if not isinstance(tree, dict):
        return tree
    if depth > _MAX_DEPTH:
        raise errors.DamagedError(f"{where}: is nested more than {_MAX_DEPTH} deep.")
    if _CHUNKED not in tree:
        return {key: _join_large(value, where, depth + 1) for key, value in tree.items()}
    try:
        shape = [tree["shape"][str(i)] for i in range(len(tree["shape"]))]
        chunks = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
        if not _is_shape(shape):
            raise ValueError(f"shape {shape}")
        return np.concatenate([np.ravel(chunk) for chunk in chunks]).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise errors.DamagedError(f"{where}: an array in pieces is damaged: {error!r}.") from error
