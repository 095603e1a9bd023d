"""The command `tekoa`: reads the words, calls the mode, tells mistakes plainly.

Exit codes: 0 done, 2 a mistake in the call, 75 stopped by a signal and resumable,
76 numbers were not finite (the last good state is saved), 69 another process of the run is
gone or stuck, 130 interrupted while there was
nothing to save, 141 nobody reads the output, else that of the store's error: 65 nothing
usable, 66 does not fit the model, 73 another process writes there, 74 saves failed, 70 any
other.
"""

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import tekoa
from tekoa.estimator import config as flags

EXIT_USAGE = 2
EXIT_NOT_FINITE = 76
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

_USAGE = """Usage: tekoa COMMAND [MODEL] [--flags]

Commands:
  train MODEL      train; go on where an earlier run stopped
  eval MODEL       evaluate the newest checkpoint
  eval_wait MODEL  evaluate each checkpoint of a training as it comes, and keep the best
  predict MODEL    write one line per example
  scales MODEL     the scales and slot shapes of Amos, read off the model
  plan MODEL       what a training needs on each device of a mesh, before anything is allocated
  models           list the bundled models
  inspect DIR      list the checkpoints of a directory
  page DIR         write a page of a run, with its curves: NAME.html here, or --out=FILE
  convert SRC DST --to=t5x|tekoa   copy a checkpoint into another format
  launch --processes=N [--devices=M] COMMAND ...   run a command in several processes here

Without a command the mode follows from the flags, or from --mode.

MODEL is a bundled name, a module, or the path of a .py file.
`tekoa train mnist` needs nothing else.

Flags:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or {"--help", "-h", "help"} & set(arguments):
        print(_help(arguments))
        return 0 if arguments else EXIT_USAGE
    if arguments == ["--version"]:
        print(f"tekoa {tekoa.__version__}")
        return 0
    if arguments[0] == "launch":
        return _run(lambda: _launch(arguments[1:]))
    return _run(lambda: _one(arguments))


def _one(arguments: Sequence[str]) -> int:
    words, config = flags.parse(arguments)
    return _command(words)(words[1:], config)


def _launch(arguments: Sequence[str]) -> int:
    from tekoa.estimator import launch

    return launch.launch(arguments)


def _run(command: Callable[[], int]) -> int:
    """Runs a command; tells in a line what is no fault of the program."""
    try:
        return command()
    except flags.UsageError as error:
        print(f"tekoa: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("tekoa: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Nobody reads the output any more; Python must not try to flush it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except Exception as error:
        code = _known(error)
        if code is None:
            raise
        print(f"tekoa: {error}", file=sys.stderr)
        return code


def _help(arguments: Sequence[str]) -> str:
    """All that there is, or what belongs to the command that was named."""
    named = [word for word in arguments if word in _COMMANDS]
    if arguments and arguments[0] == "launch" and not named:
        from tekoa.estimator import launch

        return f"Usage: {launch.USAGE}\n\n{launch.__doc__}"
    if not named:
        return _USAGE + flags.help_text()
    lines = [line for line in _USAGE.splitlines() if line.startswith(f"  {named[0]} ")]
    return "\n".join([*lines, "", "Flags:", flags.help_text(named[0])])


def _command(words: list[str]) -> Callable[[list[str], flags.RunConfig], int]:
    if not words:
        return _by_flags
    if words[0] not in _COMMANDS:
        close = difflib.get_close_matches(words[0], [*_COMMANDS, "launch"], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise flags.UsageError(
            f"There is no command {words[0]!r}.{hint} Commands are: {', '.join(_COMMANDS)}, launch."
        )
    return _COMMANDS[words[0]]


def _by_flags(words: list[str], config: flags.RunConfig) -> int:
    with _signals_wait():
        from tekoa.estimator import modes
    return _mode(modes.choose_mode(config))(words, config)


def _mode(name: str) -> Callable[[list[str], flags.RunConfig], int]:
    def run(words: list[str], config: flags.RunConfig) -> int:
        config = _with_model(words, config)
        with _signals_wait():
            from tekoa.estimator import group

        return group.ended(lambda: _run(lambda: _in_mode(name, config)))

    return run


def _in_mode(name: str, config: flags.RunConfig) -> int:
    with _signals_wait():
        from tekoa.estimator import compile_cache, group
    config = group.join(config)
    with _signals_wait():
        from tekoa.estimator import modes

    # A dry run writes nothing, and tells how long compiling takes.
    with compile_cache.opened(compile_cache.OFF if config.dry_run else config.compile_cache):
        return getattr(modes, f"run_{name}")(config)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Keeps an interrupt for later: native libraries may crash while they are loaded."""
    from tekoa.store import signals

    with signals.stop_flag() as flag:
        yield
    if flag.is_set():
        raise KeyboardInterrupt


def _models(words: list[str], config: flags.RunConfig) -> int:
    del words, config
    from tekoa.estimator import module

    for name in module.BUNDLED:
        first, *_ = (module.load_module(name).__doc__ or "").splitlines()
        print(f"{name:20} {first}")
    return 0


def _inspect(words: list[str], config: flags.RunConfig) -> int:
    del config
    if len(words) != 1:
        raise flags.UsageError("Which directory? `tekoa inspect DIR`.")
    from tekoa.estimator import inspection

    return inspection.show(words[0])


def _page(words: list[str], config: flags.RunConfig) -> int:
    if len(words) != 1:
        raise flags.UsageError("Of which run? `tekoa page MODEL_DIR [--out=FILE.html]`.")
    from tekoa.estimator import page

    return page.show(words[0], config.out)


def _convert(words: list[str], config: flags.RunConfig) -> int:
    if len(words) != 2 or config.to not in ("t5x", "tekoa"):
        raise flags.UsageError("From where to where? `tekoa convert SRC DST --to=t5x|tekoa`.")
    from tekoa.store import converting

    print(f"Wrote {converting.convert(*words, layout=config.to)}.")
    return 0


def _with_model(words: list[str], config: flags.RunConfig) -> flags.RunConfig:
    if len(words) > 1:
        raise flags.UsageError(f"One model at a time, got {' '.join(words)!r}.")
    return config.with_defaults({"module_imp": words[0]}) if words else config


def _known(error: Exception) -> int | None:
    """The exit code of errors that are no fault of the program."""
    from tekoa.core.guard import NonFiniteError
    from tekoa.core.hosts import HostsError
    from tekoa.core.sharding_mesh import LayoutError
    from tekoa.data import DataError
    from tekoa.store.errors import StoreError

    if isinstance(error, (DataError, LayoutError, PermissionError)):
        return EXIT_USAGE
    if isinstance(error, NonFiniteError):
        return EXIT_NOT_FINITE
    return error.exit_code if isinstance(error, (StoreError, HostsError)) else None


_COMMANDS: dict[str, Callable[[list[str], flags.RunConfig], int]] = {
    "train": _mode("train"),
    "eval": _mode("eval_once"),
    "eval_wait": _mode("eval_wait"),
    "predict": _mode("predict"),
    "scales": _mode("scales"),
    "plan": _mode("plan"),
    "models": _models,
    "inspect": _inspect,
    "page": _page,
    "convert": _convert,
}
