"""Data patterns: strings such as 'idx://data/mnist/split=train' or '*.jsonl' that name data."""

import glob
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tekoa.core import files as core_files
from tekoa.data import mixing, remote
from tekoa.data.readers import huggingface, lines, records, shards, tables, tfds
from tekoa.data.readers.base import DataError, Info, RandomAccess, Reader, RowRequest
from tekoa.data.readers.images import arrays, folders
from tekoa.data.readers.views import Concatenated
from tekoa.data.source import Source

Pattern = str | Path | Sequence[str]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SHARD_OF = r"(-\d+-of-\d+)?"


def load(pattern: Pattern) -> Source:
    """Opens the data that a pattern names.

    Args:
        pattern: A scheme (`digits://split=train`, `idx://DIR/split=train`, `npz://FILE`,
            `images://DIR/size=64`, `tfds://NAME/split=train`, `hf://DIR/split=train`, `dummy://`),
            a path or glob of .jsonl, .csv, .parquet, .npz, .tfrecord, .array_record, .tar, image
            or text files, a directory of images, several of them separated by commas, or a list;
            or a mixture, `mix://WEIGHT*PATTERN; WEIGHT*PATTERN`. Files and globs may be in an
            object store: `s3://BUCKET/*.jsonl`, `gs://BUCKET/*.jsonl`.

    Returns:
        A source of all examples, one file after the other. It is empty for `dummy://`, which
        is for models that generate their own data.

    Raises:
        DataError: If a pattern matches nothing or a file cannot be read.

    >>> load('digits://split=train')[0]['label']
    array(0, dtype=int32)
    """
    if isinstance(pattern, str) and mixing.is_mixture(pattern):
        return mixing.open_parts(pattern, load)
    names = filenames(pattern)
    if not names:
        return Source(DummyReader())
    readers: list[Reader] = []
    for (_, read), names_of_kind in itertools.groupby(names, _kind_of):
        readers += read(list(names_of_kind))
    for reader in readers:
        reader.first()  # Finds a broken file now rather than in the middle of training.
    return Source(readers[0] if len(readers) == 1 else Concatenated(readers))


def filenames(pattern: Pattern) -> list[str]:
    """Lists the files and schemes that a pattern matches; `dummy://` matches none.

    Raises:
        DataError: If a path or glob matches no file, a scheme is unknown, or it is a mixture.

    >>> filenames('digits://split=train,dummy://')
    ['digits://split=train']
    """
    mixing.without_mixture(pattern)
    if isinstance(pattern, Path):
        pattern = [str(pattern)]
    pieces = pattern.split(",") if isinstance(pattern, str) else pattern
    pieces = [str(piece).strip() for piece in pieces]
    if "" in pieces:
        raise DataError(
            f"The data pattern {','.join(pieces)!r} has an empty part. Remove the extra comma, or "
            "use dummy:// if there is no data."
        )
    return [name for piece in pieces for name in _expand(piece)]


def _expand(piece: str) -> list[str]:
    scheme = _SCHEME.fullmatch(piece)
    if scheme is None:
        is_folder = Path(piece).is_dir() and folders.has_images(piece)
        return [f"images://{piece}"] if is_folder else _match_files(piece, piece)
    kind, rest = scheme.groups()
    if kind == "dummy":
        return []
    if kind in remote.SCHEMES:
        return remote.fetch(piece)
    if kind == "npz":
        return [f"npz://{path}" for path in _match_files(rest, piece)]
    if kind not in _SCHEMES:
        raise DataError(
            f"The data pattern {piece!r} has the unknown scheme {kind!r}. The schemes are "
            f"{sorted([*_SCHEMES, *remote.SCHEMES, 'dummy', 'mix'])}; for files, use their paths."
        )
    return [piece]


def _match_files(path: str, piece: str) -> list[str]:
    # An existing file has precedence, so that '[' in its name needs no escaping.
    path = str(core_files.local_path(path))
    matches = [path] if Path(path).is_file() else sorted(glob.glob(path, recursive=True))
    matches = [name for name in matches if Path(name).is_file()]
    if not matches:
        hint = " It is a directory; add /* for the files in it." if Path(path).is_dir() else ""
        if "{" in path:
            hint = " Braces are not expanded: use a glob, such as part-*.tar."
        raise DataError(f"The data pattern {piece!r} matches no file.{hint}")
    return matches


def _kind_of(name: str) -> tuple[str, Callable[[list[str]], list[Reader]]]:
    """Returns the kind of a name and the function that reads several names of that kind."""
    scheme = _SCHEME.fullmatch(name)
    if scheme is not None:
        return scheme[1], _SCHEMES[scheme[1]]
    bare = name.removesuffix(".gz")
    ending = next(e for e in _ENDINGS if re.search(e, bare, re.IGNORECASE))
    return ending, _ENDINGS[ending]


def _one_by_one(read: Callable[[str], Reader]) -> Callable[[list[str]], list[Reader]]:
    return lambda names: [read(name) for name in names]


def _after_scheme(read: Callable[[str], Reader]) -> Callable[[list[str]], list[Reader]]:
    return lambda names: [read(name.partition("://")[2]) for name in names]


def _read_digits(rest: str) -> Reader:
    if not rest.startswith("split="):
        raise DataError(f"digits://{rest}: use digits://split=train or digits://split=test.")
    return arrays.read_digits(rest.removeprefix("split="))


def _read_idx(rest: str) -> Reader:
    directory, separator, split = rest.rpartition("/split=")
    if not separator:
        raise DataError(f"idx://{rest} must have the form idx://DIR/split=train or .../split=test.")
    return arrays.read_idx_split(directory, split)


_SCHEMES: dict[str, Callable[[list[str]], list[Reader]]] = {
    "digits": _after_scheme(_read_digits),
    "idx": _after_scheme(_read_idx),
    "images": lambda names: [folders.read_folders([n.partition("://")[2] for n in names])],
    "npz": _after_scheme(arrays.read_npz),
    "tfds": _after_scheme(tfds.read_tfds),
    "hf": _after_scheme(huggingface.read_saved),
}

_ENDINGS: dict[str, Callable[[list[str]], list[Reader]]] = {
    r"\.jsonl$": lambda paths: [lines.LineReader(paths, lines.json_example)],
    r"\.csv$": _one_by_one(tables.read_csv),
    r"\.parquet$": _one_by_one(tables.read_parquet),
    r"\.npz$": _one_by_one(arrays.read_npz),
    folders.ENDINGS: lambda paths: [folders.read_files(paths)],
    r"\.tar$": lambda paths: [shards.read_shards(paths)],
    rf"\.tfrecords?{_SHARD_OF}$": lambda paths: [records.read_tfrecords(paths)],
    rf"\.array_?record{_SHARD_OF}$": lambda paths: [records.read_array_records(paths)],
    r"$": lambda paths: [lines.LineReader(paths, lines.text_example)],  # Any other file is text.
}


class DummyReader(RandomAccess):
    """No data: `dummy://`, for models that generate their own."""

    name = "dummy:// (the model makes its own data)"
    info = Info(name=name)

    def __len__(self) -> int:
        return 0

    def gather(self, request: RowRequest) -> dict:
        raise DataError("dummy:// has no examples; the model must generate its own data.")
