"""The command `tekoa`: parses its arguments, runs a command and reports errors.

JAX is imported only by the commands that need it: help, usage errors, `tekoa inspect` and
`tekoa page` respond at once.
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

import tekoa
from tekoa.core import files, messages
from tekoa.estimator.cli import flags, output, processes
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.model_file import names


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `tekoa`.

    Attributes:
        name: Name of the command.
        arguments: Positional arguments, as shown in the help.
        summary: One line of help.
        function: `module:function` within `tekoa.estimator`, imported when the command runs.
            It is called with the positional arguments (except a model) and the flags, and
            returns the exit code.
        requires: Description of the positional arguments, for the error if they are missing.
        flags: The flags to show in the usage line.
        is_own_parser: Whether the function parses its flags itself: it is called with the
            arguments as they are. Its module has the usage line and the help text.
    """

    name: str
    arguments: str
    summary: str
    function: str
    _: dataclasses.KW_ONLY
    requires: str = "no arguments"
    flags: str = ""
    is_own_parser: bool = False

    @property
    def needs_model(self) -> bool:
        """Whether the command runs a model, which `--module_imp` can name as well."""
        return self.arguments == "MODEL"

    @property
    def usage(self) -> str:
        """How to call the command."""
        shown_flags = "[--flags]" if self.needs_model else self.flags
        return " ".join(filter(None, ["tekoa", self.name, self.arguments, shown_flags]))

    def load(self) -> Callable[..., int]:
        """Imports the function of the command."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"tekoa.estimator.{module}"), name)


# fmt: off
COMMANDS = (
    Command("train", "MODEL", "train a model, resuming an earlier run if there is one",
            "modes.train:run_train"),
    Command("eval", "MODEL", "evaluate the newest checkpoint", "modes.evaluate:run_eval_once"),
    Command("eval_wait", "MODEL",
            "evaluate each checkpoint of a run as it is written and keep the best",
            "modes.evaluate:run_eval_wait"),
    Command("predict", "MODEL", "write one prediction per line", "modes.evaluate:run_predict"),
    Command("scales", "MODEL", "print the Amos scale and slot shape of every parameter",
            "modes.evaluate:run_scales"),
    Command("plan", "MODEL", "estimate the memory per device before allocating anything",
            "modes.plan:run_plan"),
    Command("new", "FILE", "write a model file to start from", "modes.new:run_new",
            requires="a file", flags="[--library=nnx|linen|equinox] [--long]"),
    Command("models", "", "list the bundled models", "modes.models:run_models"),
    Command("inspect", "DIR", "list the checkpoints in a directory and verify their checksums",
            "modes.inspect:run_inspect", requires="a directory"),
    Command("page", "DIR...", "write an HTML page of a run, or one that compares several",
            "report.page:run_page", requires="one or more directories",
            flags="[--out=FILE] [--serve]"),
    Command("convert", "SRC DST", "copy a checkpoint into another format",
            "modes.convert:run_convert", requires="a source and a destination",
            flags="--to=native|t5x"),
    Command("replay", "RUN", "run steps of a run again, and compare the result",
            "replay.replay:run_replay", is_own_parser=True),
    Command("verify", "RUN", "prove that a run was made by its code on its data",
            "replay.verify:run_verify", is_own_parser=True),
    Command("diff", "A B", "find the step in which two runs part, and why",
            "replay.diff:run_diff", is_own_parser=True),
    Command("why", "RUN", "explain why a run met NaN or Inf",
            "replay.why:run_why", is_own_parser=True),
    Command("sweep", "MODEL", "train a model with several settings at once, and compare them",
            "sweep.sweep:run_sweep", is_own_parser=True),
    Command("eject", "RUN", "write a run as one plain Python file, without Tekoa",
            "eject.eject:run_eject", is_own_parser=True),
    Command("export", "RUN", "write a trained model for other libraries",
            "modes.export:run_export", requires="the directory of a run or of a checkpoint",
            flags="--to=safetensors|numpy|orbax|stablehlo|onnx [--out=FILE]"),
    Command("launch", "COMMAND", "run a command in several processes on this machine",
            "cli.launch:launch", is_own_parser=True),
)
# fmt: on
_BY_NAME = {command.name: command for command in COMMANDS}
# What messages of the library recommend, and how the command does it.
_FLAGS_OF_ARGUMENTS = {
    'pass on_nan="skip".': "set --on_nan=skip. `tekoa why RUN` finds where it began.",
    "restore with allow_changes=True": "set --allow_data_changes",
}
_HELP_WORDS = {"--help", "-h", "help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _quote_names_in_logs()
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # Reports a closed pipe while the exit code can still be set.
    except BaseException as error:
        code = _report(error)
        if code is None:
            processes.leave_after_crash(error)
            raise
    processes.leave(code)
    return code


def _run(arguments: Sequence[str]) -> int:
    if not arguments or _HELP_WORDS & set(arguments):
        print(_help(arguments))
        return ExitCode.SUCCESS if arguments else ExitCode.USAGE
    if arguments == ["--version"]:
        print(f"tekoa {tekoa.__version__}")
        return ExitCode.SUCCESS
    first = _BY_NAME.get(arguments[0])
    if first is not None and first.is_own_parser:
        return first.load()(arguments[1:])
    words, config = flags.parse(arguments)
    if not words:
        name = choose_command(config)
        if unused := flags.unused(config, name):
            # Scripts for JEstimator pass one set of flags to all modes.
            print(f"{name} ignores {', '.join(unused)}.", file=sys.stderr)
        return _run_model(_BY_NAME[name], words, config)
    name, *words = words
    if name not in _BY_NAME:
        hint = messages.did_you_mean(name, _BY_NAME)
        raise flags.UsageError(
            f"Unknown command {name!r}.{hint} Run `tekoa --help` for a list of commands."
        )
    command = _BY_NAME[name]
    if command.is_own_parser:
        raise flags.UsageError(f"{name} must be the first argument.")
    if unused := flags.unused(config, name):
        raise flags.UsageError(
            f"tekoa {name} does not use {', '.join(unused)}. "
            f"Run `tekoa {name} --help` for its flags."
        )
    if command.needs_model:
        return _run_model(command, words, config)
    is_list = command.arguments.endswith("...")
    if (is_list and not words) or (not is_list and len(words) != len(command.arguments.split())):
        got = f", got {' '.join(words)!r}" if words else ""
        raise flags.UsageError(f"{name} needs {command.requires}{got}. Usage: {command.usage}")
    return command.load()(words, config) if is_list else command.load()(*words, config)


def _run_model(command: Command, words: Sequence[str], config: flags.RunConfig) -> int:
    if len(words) > 1:
        raise flags.UsageError(f"{command.name} accepts one model, got {' '.join(words)!r}.")
    if words:
        config = config.with_defaults({"module_imp": words[0]})
    if config.again is not None:
        from tekoa.estimator.cli import again

        config = again.repeat(config)
    names.check_model(config.module_imp)
    with _interrupts_deferred():
        from tekoa.estimator.cli import compile_cache
    config = processes.join(config)
    with _interrupts_deferred():
        function = command.load()
    # A dry run writes nothing and measures how long compilation takes.
    cache = compile_cache.OFF if config.dry_run else config.compile_cache
    with compile_cache.enabled(cache), output.only_json(config.json):
        return function(config)


def choose_command(config: flags.RunConfig) -> str:
    """Chooses the command from the flags, as JEstimator's runner does.

    Raises:
        UsageError: If the flags do not determine the command.
    """
    if config.mode is not None:
        return "eval" if config.mode == "eval_once" else config.mode
    kinds = [k for k in ("train", "eval", "pred") if getattr(config, f"{k}_pattern") is not None]
    if "pred" in kinds and len(kinds) > 1:
        names = " and ".join(f"--{kind}_pattern" for kind in kinds)
        raise flags.UsageError(f"{names} are ambiguous together: set --mode or name a command.")
    if "eval" in kinds:
        from tekoa.store.commit import paths
        from tekoa.store.mirror import mirror

        model_dir = mirror.fetched(config.model_dir or ".", steps="none")
        has_checkpoints = bool(paths.list_steps(model_dir))
        return "eval" if has_checkpoints and "train" not in kinds else "eval_wait"
    if kinds:
        return "predict" if "pred" in kinds else "train"
    raise flags.UsageError(
        "No command given. Run a command such as `tekoa train mnist`, or set --train_pattern, "
        "--eval_pattern or --pred_pattern."
    )


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delays an interrupt until the block ends: native libraries may crash while loading."""
    from tekoa.hosts import signals

    with signals.stop_flag() as flag:
        yield
    if flag.signal is not None:
        raise _EndedError(flag.signal)


class _EndedError(Exception):
    """A signal ended the command before it did anything."""

    def __init__(self, number: signal.Signals):
        super().__init__(f"ended by {number.name}; nothing was saved.")
        self.exit_code = 128 + number


def _quote_names_in_logs() -> None:
    """Escapes control characters in the lines that Python logs to standard error by itself."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return messages.printable(super().format(record))


def _report(error: BaseException) -> int | None:
    """Prints an expected error and returns its exit code; returns None for any other."""
    try:
        if isinstance(error, BrokenPipeError):
            raise error
        code = _exit_code(error)
        if code is not None:
            text = "interrupted." if isinstance(error, KeyboardInterrupt) else _in_flags(str(error))
            if isinstance(error, PermissionError) and error.filename is not None:
                text = f"{error.filename}: {error.strerror}. Check its owner and its permissions."
            if code == ExitCode.PEER_LOST:
                text = f"another process was lost: {text} Restart all processes to resume."
            print(messages.printable(f"tekoa: {text}"), file=sys.stderr, flush=True)
        return code
    except BrokenPipeError:
        # Python would fail again when it flushes its output at exit.
        for fd in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        return ExitCode.PIPE


def _in_flags(text: str) -> str:
    """Returns an error message with flags in place of the arguments of Python functions."""
    for argument, flag in _FLAGS_OF_ARGUMENTS.items():
        text = text.replace(argument, flag)
    return text


def _exit_code(error: BaseException) -> int | None:
    from tekoa._extras import MissingPackageError
    from tekoa.hosts import HostsError, is_failed_collective
    from tekoa.store.errors import StoreError

    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, _EndedError):
        return error.exit_code
    if isinstance(error, InterruptedError):  # An evaluation or a prediction was stopped.
        return ExitCode.STOPPED
    known = (flags.UsageError, files.PathError, StoreError, HostsError, MissingPackageError)
    if isinstance(error, known):
        return error.exit_code
    if isinstance(error, PermissionError):
        return ExitCode.USAGE
    if isinstance(error, OSError) and error.filename is not None and _is_own(error):
        return ExitCode.STORE

    # These import JAX.
    from tekoa.core.loss.reduction import ReductionError
    from tekoa.core.nonfinite import NonFiniteError
    from tekoa.core.update.average import AverageError
    from tekoa.data import DataError
    from tekoa.optim.named import OtherRulesError
    from tekoa.sharding.mesh import LayoutError

    usage = (AverageError, DataError, LayoutError, OtherRulesError, ReductionError)
    if isinstance(error, usage):
        return ExitCode.USAGE
    if is_failed_collective(error):
        return ExitCode.PEER_LOST
    return ExitCode.NON_FINITE if isinstance(error, NonFiniteError) else None


def _is_own(error: BaseException) -> bool:
    """Returns whether an error was raised by Tekoa itself, rather than by code of the user."""
    package, library = pathlib.Path(tekoa.__file__).parent, pathlib.Path(os.__file__).parent
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = pathlib.Path(frame.f_code.co_filename)
        if path.is_relative_to(package):
            return True
        if not path.is_relative_to(library) or "site-packages" in path.parts:
            return False
    return False


_HELP = """\
Usage: tekoa COMMAND [MODEL] [--flags]

Commands:
{commands}

MODEL is a bundled model, a module or the path of a .py file. `tekoa train mnist` needs no flags.
If COMMAND is omitted, it is inferred from --mode or the --*_pattern flags.
Run `tekoa COMMAND --help` for the flags of one command.

Flags:
{flags}

Exit codes:
{exit_codes}"""


def _help(arguments: Sequence[str]) -> str:
    """Returns the help text of the command in the arguments, or of all commands."""
    name = next((word for word in arguments if word in _BY_NAME), None)
    if name is not None and _BY_NAME[name].is_own_parser:
        module = sys.modules[_BY_NAME[name].load().__module__]
        return f"Usage: {module.USAGE}\n\n{module.__doc__}"
    if name is not None:
        command, text = _BY_NAME[name], flags.help_text(name)
        summary = f"{command.summary[0].upper()}{command.summary[1:]}."
        return f"Usage: {command.usage}\n\n{summary}" + (f"\n\nFlags:\n{text}" if text else "")
    return _HELP.format(
        commands="\n".join(f"  {c.name + ' ' + c.arguments:16} {c.summary}" for c in COMMANDS),
        flags=flags.help_text(),
        exit_codes="\n".join(f"  {code:<4} {code.meaning}" for code in ExitCode),
    )
