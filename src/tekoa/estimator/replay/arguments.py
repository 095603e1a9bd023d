"""Arguments of the commands that replay runs; each has few flags of its own."""

import argparse
import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from tekoa.core.messages import did_you_mean
from tekoa.estimator.cli.flags import UsageError
from tekoa.store.mirror import mirror


class Arguments(argparse.ArgumentParser):
    """Parses the arguments of one command, and reports mistakes as `UsageError`.

    Args:
        command: The name of the command.
        positional: The names of its positional arguments: directories of runs.
    """

    def __init__(self, command: str, *positional: str):
        super().__init__(prog=f"tekoa {command}", add_help=False, allow_abbrev=False)
        self._positional = positional
        for name in positional:
            self.add_argument(name)

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("tekoa ")
        raise UsageError(f"{command}: {message}. Run `{self.prog} --help`.")

    def hint(self, argument: str) -> str:
        """Returns ' Did you mean ...?' with the flag that an argument resembles."""
        names = [name.removeprefix("--") for name in self._option_string_actions]
        return did_you_mean(argument.lstrip("-").partition("=")[0], names, prefix="--")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses the arguments; the directories must exist.

        Raises:
            UsageError: If an argument is missing, unknown or wrong.
        """
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            raise UsageError(
                f"{self.prog} does not know {unknown[0]!r}.{self.hint(unknown[0])} "
                f"Run `{self.prog} --help`."
            )
        for name in self._positional:
            path = mirror.fetched(getattr(parsed, name), steps="none")
            if path.is_file():
                raise UsageError(f"{mirror.shown(path)!r} is a file. Name the directory of a run.")
            if not path.is_dir():
                raise UsageError(f"Directory {mirror.shown(path)!r} does not exist.")
        return parsed


def fraction(text: str) -> float:
    """Parses a number above 0 and at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def step(text: str) -> int:
    """Parses the number of a step."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Reuses the programs that the run itself compiled."""
    from tekoa.estimator.cli import compile_cache

    with compile_cache.enabled(None):
        yield


def print_differences(directory: pathlib.Path, lines: Sequence[Any]) -> None:
    """Prints what differs between the record of a run and this machine."""
    if lines:
        print(f"Not as when {mirror.shown(directory)} was trained:")
        for line in lines:
            print(f"  {line}")
