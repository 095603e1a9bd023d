"""The msgpack file of a T5X checkpoint: nested maps with small arrays inside.

The format is Flax's, and Flax writes and reads it. Files may come from anywhere, so everything
that Flax returns is checked here; Flax itself allocates no more than the size of the file.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tekoa.core import files
from tekoa.store import errors
from tekoa.store.formats.leaves import to_dtype

_MAX_DEPTH = 100


def pack(tree: Any) -> bytes:
    """Encodes nested dicts of numpy arrays, numbers, strings and None, in their order."""
    import flax.serialization

    # Flax's own copy would sort the keys.
    copy = map_dicts(lambda leaf: leaf, tree)
    return flax.serialization.msgpack_serialize(copy, in_place=True)


def map_dicts(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to the leaves of nested dicts; unlike `jax.tree.map` it keeps their order."""
    if isinstance(tree, Mapping):
        return {key: map_dicts(fn, child) for key, child in tree.items()}
    return fn(tree)


def read(path: pathlib.Path) -> Any:
    """Reads and decodes a file; see `unpack`.

    A file that does not start with a map is refused before it is read completely.
    """
    try:
        with files.open_regular(path) as file:
            start = file.read(1)
            if not start or not (start[0] >> 4 == 0x8 or start[0] in (0xDE, 0xDF)):
                raise errors.DamagedError(f"{path}: is not a msgpack checkpoint: it has no map.")
            return unpack(start + file.read(), str(path))
    except PermissionError:
        raise  # This is no damage.
    except OSError as error:
        raise errors.DamagedError(f"{path}: cannot be read: {error.strerror}.") from None
    except MemoryError:
        raise errors.DamagedError(f"{path}: is larger than the memory.") from None


def unpack(data: bytes, where: str) -> Any:
    """Decodes the output of `pack` or of Flax.

    Args:
        data: The contents of the file.
        where: The name of the file, for messages.

    Raises:
        errors.DamagedError: If the file is truncated or not in this format.
    """
    import flax.serialization
    import msgpack

    # All that Flax, msgpack and numpy raise for malformed bytes.
    failures = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    try:
        tree = flax.serialization.msgpack_restore(data)
    except (*failures, RecursionError, SyntaxError, msgpack.UnpackException) as error:
        raise errors.DamagedError(f"{where}: is not a msgpack checkpoint: {error!r}.") from error
    return _check(tree, where, depth=0)


def _check(node: Any, where: str, depth: int) -> Any:
    """Returns a decoded node with writable arrays, if everything in it is allowed."""
    import msgpack

    if depth > _MAX_DEPTH:
        raise errors.DamagedError(f"{where}: is nested more than {_MAX_DEPTH} levels deep.")
    if isinstance(node, msgpack.ExtType):
        raise errors.DamagedError(f"{where}: contains an unknown msgpack type {node.code}.")
    if isinstance(node, np.ndarray | np.generic):
        # A copy, since arrays over msgpack's bytes are read-only.
        return node.astype(to_dtype(node.dtype.name, where))
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            node[key] = _check(node[key], where, depth + 1)  # In place, to free the originals.
    return node
