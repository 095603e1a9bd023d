"""Data patterns: what a string such as 'idx://data/mnist/split=train' or '*.jsonl' stands for."""

import glob
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tekoa.data import images, lines, records, tables, tfds
from tekoa.data.reader import DataError, Draw, Info, RandomAccess, Reader
from tekoa.data.source import Source
from tekoa.data.wrappers import Concatenated

Pattern = str | Path | Sequence[str]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SHARD_OF = r"(-\d+-of-\d+)?"


def load(pattern: Pattern) -> Source:
    """Opens the data that a pattern stands for.

    Args:
        pattern: A scheme (`digits://split=train`, `idx://DIR/split=train`, `npz://FILE`,
            `tfds://NAME/split=train`, `dummy://`), a path or glob of .jsonl, .csv, .parquet,
            .npz, .tfrecord, .array_record or text files, several of them with commas
            between, or a list.

    Returns:
        A source of all the examples, one file after the other. `dummy://` gives one without
        examples: the model makes its own.

    Raises:
        DataError: If a pattern matches nothing or a file cannot be read; it names both.

    >>> load('digits://split=train')[0]['label']
    array(0, dtype=int32)
    """
    names = filenames(pattern)
    if not names:
        return Source(DummyReader())
    parts: list[Reader] = []
    for (_, read), same in itertools.groupby(names, _reader_of):
        parts += read(list(same))
    for part in parts:
        part.first()  # A broken file shows itself here rather than in the middle of training.
    return Source(parts[0] if len(parts) == 1 else Concatenated(parts))


def filenames(pattern: Pattern) -> list[str]:
    """Lists the files and schemes that a pattern stands for; `dummy://` stands for none.

    Raises:
        DataError: If a path or glob matches no file, or a scheme is not known.

    >>> filenames('digits://split=train,dummy://')
    ['digits://split=train']
    """
    if isinstance(pattern, Path):
        pattern = [str(pattern)]
    pieces = pattern.split(",") if isinstance(pattern, str) else pattern
    pieces = [str(piece).strip() for piece in pieces]
    if "" in pieces:
        raise DataError(f"The data pattern {','.join(pieces)!r} has an empty part.")
    return [name for piece in pieces for name in _expanded(piece)]


def _expanded(piece: str) -> list[str]:
    scheme = _SCHEME.fullmatch(piece)
    if scheme is None:
        return _matches(piece, piece)
    kind, rest = scheme.groups()
    if kind == "dummy":
        return []
    if kind == "npz":
        return [f"npz://{path}" for path in _matches(rest, piece)]
    if kind not in _SCHEMES:
        raise DataError(
            f"The data pattern {piece!r} has the unknown scheme {kind!r}. There are "
            f"{sorted([*_SCHEMES, 'dummy'])}; files are given by their paths."
        )
    return [piece]


def _matches(path: str, piece: str) -> list[str]:
    # A name that is there wins, so that '[' in a file's name does not need escaping.
    found = [path] if Path(path).is_file() else sorted(glob.glob(path, recursive=True))
    found = [name for name in found if Path(name).is_file()]
    if not found:
        hint = " It is a directory; add /* for the files in it." if Path(path).is_dir() else ""
        raise DataError(f"The data pattern {piece!r} matches no file.{hint}")
    return found


def _reader_of(name: str) -> tuple[str, Callable[[list[str]], list[Reader]]]:
    """Gives the kind of a name and the function that reads several of that kind."""
    scheme = _SCHEME.fullmatch(name)
    if scheme is not None:
        return scheme[1], _SCHEMES[scheme[1]]
    bare = name.removesuffix(".gz")
    for ending, read in _ENDINGS.items():
        if re.search(ending, bare, re.IGNORECASE):
            return ending, read
    return "text", _read_text


def _read_text(paths: list[str]) -> list[Reader]:
    return [lines.LineReader(paths, lines.text_example)]


def _read_json(paths: list[str]) -> list[Reader]:
    return [lines.LineReader(paths, lines.json_example)]


def _one_by_one(read: Callable[[str], Reader]) -> Callable[[list[str]], list[Reader]]:
    return lambda names: [read(name) for name in names]


def _after_scheme(read: Callable[[str], Reader]) -> Callable[[list[str]], list[Reader]]:
    return lambda names: [read(name.partition("://")[2]) for name in names]


def _read_digits(rest: str) -> Reader:
    if not rest.startswith("split="):
        raise DataError(f"digits://{rest} must be digits://split=train or digits://split=test.")
    return images.read_digits(rest.removeprefix("split="))


def _read_idx(rest: str) -> Reader:
    directory, mark, split = rest.rpartition("/split=")
    if not mark:
        raise DataError(f"idx://{rest} must have the form idx://DIR/split=train or .../split=test.")
    return images.read_idx_split(directory, split)


_SCHEMES: dict[str, Callable[[list[str]], list[Reader]]] = {
    "digits": _after_scheme(_read_digits),
    "idx": _after_scheme(_read_idx),
    "npz": _after_scheme(images.read_npz),
    "tfds": _after_scheme(tfds.read_tfds),
}

_ENDINGS: dict[str, Callable[[list[str]], list[Reader]]] = {
    r"\.jsonl$": _read_json,
    r"\.csv$": _one_by_one(tables.read_csv),
    r"\.parquet$": _one_by_one(tables.read_parquet),
    r"\.npz$": _one_by_one(images.read_npz),
    rf"\.tfrecords?{_SHARD_OF}$": lambda paths: [records.read_tfrecords(paths)],
    rf"\.array_?record{_SHARD_OF}$": lambda paths: [records.read_array_records(paths)],
}


class DummyReader(RandomAccess):
    """No data at all: `dummy://`, for a model that makes its own."""

    name = "dummy:// (the model makes its own data)"
    info = Info(name=name)

    def __len__(self) -> int:
        return 0

    def gather(self, draw: Draw) -> dict:
        """Fails: there is nothing to give."""
        raise DataError("dummy:// has no examples of its own; the model must make them.")
