"""Standard output: text for people or, with `--json`, nothing but JSON."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

_json_stream: TextIO | None = None


@contextlib.contextmanager
def only_json(is_enabled: bool) -> Iterator[None]:
    """Prints everything except `print_json` to standard error in the body, if enabled."""
    global _json_stream
    if not is_enabled:
        yield
        return
    _json_stream = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _json_stream = None


def print_json(values: Mapping[str, Any]) -> None:
    """Prints one line of JSON to standard output."""
    print(json.dumps(values), file=_json_stream or sys.stdout, flush=True)
