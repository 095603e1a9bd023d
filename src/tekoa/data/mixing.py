"""Mixes sources by weights, and reads the pattern `mix://` that names a mixture."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tekoa.data.batching import mixture
from tekoa.data.readers import base, views
from tekoa.data.source import Source

SCHEME = "mix://"


def mix(sources: Mapping[str, Source], weights: Mapping[str, float] | None = None) -> Source:
    """Mixes sources by weights.

    A share of the examples that is proportional to its weight comes from each source, in every
    1024 examples but for rounding. Each source is walked in its own order, shuffled if the
    batches are, and starts over when it ends. Batch i depends only on the sources, the weights,
    the options of `batches` and i. `batches.examples_per_source` counts.

    One epoch of the mixture has as many examples as all sources together.

    Args:
        sources: The sources by name, with the same fields.
        weights: Weight of each source; by default its number of examples, which makes an epoch
            use each example once.

    Raises:
        ValueError: If names are missing, or a weight is not a positive number.
        DataError: If the sources differ in their fields, or one of them is a stream.

    >>> import numpy as np
    >>> from tekoa import data
    >>> a, b = (data.as_source({'x': np.arange(n) + start}) for n, start in ((6, 0), (4, 100)))
    >>> batches = mix({'a': a, 'b': b}, weights={'a': 3, 'b': 1}).batches(8)
    >>> next(batches)['x'], batches.examples_per_source
    (array([100,   0,   1,   2, 101,   3,   4,   5]), {'a': 6, 'b': 2})
    """
    if not sources:
        raise ValueError("mix needs at least one source.")
    if weights is not None and weights.keys() != sources.keys():
        raise ValueError(
            f"weights has the names {sorted(weights)}, but the sources are {sorted(sources)}."
        )
    readers = {name: source.rows_for("mix") for name, source in sources.items()}
    reader = views.Concatenated(list(readers.values()))
    sizes = {name: base.length(reader) for name, reader in readers.items()}
    if weights is None:
        units = mixture.shares_of_sizes(sizes)
    else:
        units = mixture.shares({name: weights[name] for name in sources})
    order = mixture.Mixture(tuple(sources), tuple(sizes.values()), units)
    return Source(reader, order=order)


def is_mixture(pattern: Any) -> bool:
    """Whether a pattern is one of `mix://`."""
    return isinstance(pattern, str) and pattern.strip().startswith(SCHEME)


def open_parts(pattern: str, open_part: Callable[[str], Source]) -> Source:
    """Opens a pattern, each source of a mixture by itself, with a function of one's own.

    Args:
        pattern: A mixture, `mix://WEIGHT*PATTERN; WEIGHT*PATTERN`, or any other pattern.
        open_part: Opens the pattern of one source.

    Raises:
        DataError: If the pattern has another form, or a source cannot be opened.

    >>> from tekoa import data
    >>> pattern = 'mix://3*digits://split=train; 1*digits://split=test'
    >>> open_parts(pattern, data.load).batches(32).state()['fingerprint']['order']
    'mixed digits://split=train 75.0000%, digits://split=test 25.0000%; in order'
    """
    if not is_mixture(pattern):
        return open_part(pattern)
    parts = _parts(pattern)
    try:
        return mix({name: open_part(name) for name in parts}, parts)
    except base.DataError:
        raise
    except ValueError as error:
        raise base.DataError(f"{pattern!r}: {error}") from None


def _parts(pattern: str) -> dict[str, float]:
    """Returns the pattern and the weight of each source."""
    parts: dict[str, float] = {}
    for piece in pattern.strip().removeprefix(SCHEME).split(";"):
        number, separator, name = piece.strip().partition("*")
        try:
            weight = float(number)
        except ValueError:
            separator = ""
            weight = 0.0
        if not separator or not name:
            raise base.DataError(
                f"{pattern!r}: {piece.strip()!r} must have the form WEIGHT*PATTERN, such as "
                "0.7*a.jsonl. Separate the sources with semicolons."
            )
        if name in parts:
            raise base.DataError(f"{pattern!r} has {name!r} twice. Add up its weights.")
        parts[name] = weight
    return parts


def without_mixture(pattern: str | Path | Sequence[str]) -> None:
    """Rejects a mixture where only files are accepted.

    Raises:
        DataError: If a pattern is one of `mix://`.
    """
    pieces = [pattern] if isinstance(pattern, (str, Path)) else pattern
    if any(is_mixture(piece) for piece in pieces):
        raise base.DataError(
            f"{pattern!r} is a mixture of sources, but a list of files is needed here. Use "
            "data.load, and a mixture as the complete pattern."
        )
