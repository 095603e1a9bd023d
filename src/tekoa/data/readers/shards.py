"""WebDataset shards: .tar files in which files with the same name before the dot are an example.

The index of a shard is read once, from the headers of its files. After that, every example can be
read directly, so shards are shuffled and resumed like any data with random access.
"""

import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tekoa.data.readers import files
from tekoa.data.readers.base import DataError
from tekoa.data.readers.memory import SequenceReader

_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm")


class _Member(NamedTuple):
    """A file in a shard."""

    shard: int
    field: str
    start: int
    size: int


def read_shards(paths: Sequence[str]) -> SequenceReader:
    """Reads .tar files as examples, one shard after the other.

    The ending of a file names its field: `cls` is the number `label`, `txt` is `text`, an image is
    `image`, `json` an object whose fields are added, `npy` an array; others are bytes.

    Raises:
        DataError: If a file is damaged, or examples have different fields.
    """
    shards = Shards(paths)
    return SequenceReader(shards, shards.name)


class Shards:
    """The examples of some shards by number; can be sent to a worker process."""

    def __init__(self, paths: Sequence[str]):
        self._paths = list(paths)
        self._files: dict[int, int] = {}
        n_bytes = sum(files.check_readable(path) for path in paths)
        self._examples: list[list[_Member]] = []
        for shard, path in enumerate(paths):
            self._examples += _index(path, shard)
        if not self._examples:
            raise DataError(f"{files.names(paths)}: there are no examples in the archives.")
        self.name = f"shards {files.names(paths)} of {n_bytes} bytes"

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        example: dict[str, Any] = {}
        for member in self._examples[row]:
            content = os.pread(self._file(member.shard), member.size, member.start)
            place = f"{self._paths[member.shard]}, example {row}, .{member.field}"
            if len(content) < member.size:
                raise DataError(f"{place}: the archive ends too early. Download or copy it again.")
            example.update(_decode(member.field, content, place))
        return example

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def __del__(self):
        for number in getattr(self, "_files", {}).values():
            os.close(number)

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            with files.open_file(self._paths[shard]) as file:
                self._files[shard] = os.dup(file.fileno())
        return self._files[shard]


def _index(path: str, shard: int) -> list[list[_Member]]:
    """Returns the files of each example of a shard."""
    examples: list[list[_Member]] = []
    last = None
    with files.open_file(path) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    stem, dot, field = name.partition(".")
                    if not member.isreg() or not dot or not stem:
                        continue
                    if (folder, stem) != last:
                        examples.append([])
                        last = folder, stem
                    entry = _Member(shard, field.lower(), member.offset_data, member.size)
                    examples[-1].append(entry)
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path} is not a valid uncompressed .tar file: {error}. Compressed archives "
                "cannot be read at random: unpack them to .tar."
            ) from None
    return examples


def _decode(field: str, content: bytes, place: str) -> dict[str, Any]:
    """Returns the fields of an example that one of its files provides."""
    ending = field.rpartition(".")[2]
    prefix = field.removesuffix(ending).removesuffix(".")
    decode = _DECODERS.get(ending) or (_image if ending in _IMAGES else None)
    if decode is None:
        return {field: content}
    try:
        values = decode(content)
    except DataError:
        raise
    except Exception as error:  # Decoders of images and arrays raise many kinds.
        raise DataError(f"{place} cannot be decoded: {type(error).__name__}: {error}.") from None
    if not prefix:
        return values
    # `mask.png` is a second image of the example: it keeps its own name.
    return {prefix if len(values) == 1 else f"{prefix}_{key}": v for key, v in values.items()}


def _json(content: bytes) -> dict[str, Any]:
    value = json.loads(content)
    return value if isinstance(value, dict) else {"json": value}


def _npy(content: bytes) -> dict[str, Any]:
    return {"npy": np.load(io.BytesIO(content), allow_pickle=False)}


def _image(content: bytes) -> dict[str, Any]:
    image = files.require("PIL.Image", "images", "Reading images of a .tar file")
    with image.open(io.BytesIO(content)) as picture:
        mode = "L" if picture.mode in ("1", "L", "LA") else "RGB"
        pixels = np.asarray(picture.convert(mode))
    return {"image": pixels[..., None] if mode == "L" else pixels}


_DECODERS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    "cls": lambda content: {"label": np.int32(int(content))},
    "txt": lambda content: {"text": content.decode("utf-8")},
    "json": _json,
    "npy": _npy,
}
