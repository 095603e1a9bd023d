"""Helpers for the text of messages. Imports no JAX."""

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any


def did_you_mean(
    word: str,
    choices: Iterable[str],
    *,
    n: int = 1,
    prefix: str = "",
    elsewhere: Mapping[str, str] | None = None,
) -> str:
    """Returns ' Did you mean ...?' with the closest choices, or nothing if none is close.

    Args:
        word: The word that is not known.
        choices: The known words.
        n: The largest number of choices to offer.
        prefix: Text to put before each choice, such as '--' for flags.
        elsewhere: Names that other libraries use, in lower case without punctuation, and the
            choices that they stand for.

    >>> did_you_mean('trian', ['train', 'eval'])
    " Did you mean 'train'?"
    >>> did_you_mean('xyz', ['train', 'eval'])
    ''
    >>> did_you_mean('MSELoss', ['mse'], elsewhere={'mseloss': 'mse'})
    " Did you mean 'mse'?"
    """
    known = (elsewhere or {}).get("".join(filter(str.isalnum, word.lower())))
    if known is not None:
        return f" Did you mean {prefix + known!r}?"
    by_lower = {name.lower(): name for name in choices}
    close = [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, n=n)]
    return f" Did you mean {' or '.join(repr(prefix + name) for name in close)}?" if close else ""


def some_of(names: Collection[Any], limit: int = 5) -> str:
    """Returns the first names as text, and the number of those left out.

    >>> some_of(['a', 'b', 'c'], limit=2)
    'a, b and 1 more'
    """
    shown = ", ".join(str(name) for name, _ in zip(names, range(limit), strict=False))
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def printable(text: Any) -> str:
    r"""Returns text in which control and format characters are escaped, except newlines and tabs.

    Names of files may contain anything, such as sequences that change a terminal's title.

    >>> print(printable('a\x1b[31mb'))
    a\x1b[31mb
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def array_text(dtype: Any, shape: Iterable[int]) -> str:
    """Returns an array's dtype and shape as text.

    >>> array_text('float32', (4, 2))
    'float32[4,2]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def quiet_log(library: str, level: int = logging.CRITICAL) -> None:
    """Hides what a library logs below a level, unless the program set another.

    By default hides errors too, for libraries that also raise them.
    """
    log = logging.getLogger(library)
    if log.level == logging.NOTSET:
        log.setLevel(level)
