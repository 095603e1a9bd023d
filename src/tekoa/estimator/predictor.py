"""Predictor: results of a model as lines of text."""

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TextIO

import jax


class PredictorLike(Protocol):
    """What `get_predictor` gives."""

    def consume(self, infer: Any) -> None:
        """Takes the results of one batch, in order."""
        ...

    def complete(self) -> None:
        """Is told that there are no more."""
        ...


class Predictor:
    """Writes one line per result.

    Args:
        proc_fn: `proc_fn(results)` gives what to write for the rows of a batch, one by one.
        output_path: A file that appears whole once all is written. None: standard output, or
            what `--pred_output` says.
        pre_str: A line before all others.
        post_str: A line after all others.

    >>> predictor = Predictor(lambda results: [x + 1 for x in results], post_str='end')
    >>> predictor.consume([1, 2])
    2
    3
    >>> predictor.complete()
    end
    """

    def __init__(
        self,
        proc_fn: Callable[[Any], Iterable[Any]],
        output_path: str | os.PathLike[str] | None = None,
        pre_str: str | None = None,
        post_str: str | None = None,
    ):
        self._proc_fn = proc_fn
        self.output_path = None if output_path is None else pathlib.Path(output_path).expanduser()
        self._pre, self._post = pre_str, post_str
        self._file: TextIO | None = None
        self._has_begun = False

    def lines(self, infer: Any) -> Iterator[Any]:
        """Gives what `consume` would write, the line before all others with the first."""
        if not self._has_begun and self._pre is not None:
            yield self._pre
        self._has_begun = True
        yield from self._proc_fn(infer)

    def last_lines(self) -> Iterator[Any]:
        """Gives what `complete` would write."""
        if not self._has_begun and self._pre is not None:
            yield self._pre
        if self._post is not None:
            yield self._post

    def consume(self, infer: Any) -> None:
        """Writes the results of one batch."""
        self._write(self.lines(infer))

    def complete(self) -> None:
        """Writes the last line and closes the file."""
        self._write(self.last_lines())
        if self._file is not None and self.output_path is not None:
            self._file.close()
            os.replace(self._file.name, self.output_path)

    def _write(self, lines: Iterable[Any]) -> None:
        lines = list(lines)  # Made by all processes, and written by one.
        if jax.process_index() != 0:
            return
        if self._file is None and self.output_path is not None:
            self.output_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.output_path.with_name(f"{self.output_path.name}.part").open("w")
        for line in lines:
            print(line, file=self._file)
