"""The command line: flags are parsed into a `RunConfig`.

Imports no JAX, and absl only to parse: help needs neither.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from tekoa.core import files
from tekoa.core.messages import did_you_mean
from tekoa.estimator.cli import config_files
from tekoa.estimator.cli.run_config import FIELDS
from tekoa.estimator.cli.run_config import FLAG_NAMES as FLAG_NAMES
from tekoa.estimator.cli.run_config import RunConfig as RunConfig
from tekoa.estimator.cli.run_config import UsageError as UsageError
from tekoa.store.mirror import urls

if TYPE_CHECKING:
    from absl import flags

_OLD_VALUES = {("to", "tekoa"): "native"}
_PATHS = {
    *("again", "checkpoint_path", "compile_cache", "lora_base", "model_dir", "out", "pred_output"),
}
# These may be in an object store.
_URLS = ("again", "checkpoint_path", "model_dir")
# Flags of other tools, and what they are called here.
_ELSEWHERE = {
    **dict.fromkeys(("steps", "maxsteps", "numsteps", "nsteps", "trainsteps"), "max_train_steps"),
    **dict.fromkeys(("epochs", "maxepochs", "numepochs", "numtrainepochs"), "train_epochs"),
    **dict.fromkeys(("batchsize", "perdevicetrainbatchsize"), "train_batch_size"),
    **dict.fromkeys(("outputdir", "logdir", "workdir", "directory"), "model_dir"),
    **dict.fromkeys(("data", "dataset", "datadir", "trainfile"), "train_pattern"),
    **dict.fromkeys(("quiet", "silent"), "noprogress"),
    **dict.fromkeys(("gradientclipval", "maxgradnorm"), "clip_norm"),
    **dict.fromkeys(("gradientaccumulationsteps", "accumulategradbatches"), "accumulate"),
    "lr": "learning_rate",
    "seed": "random_seed",
    "bf16": "precision",
    "fp16": "precision",
}
_MODEL_COMMANDS = ("train", "eval", "eval_wait", "predict", "scales", "plan")
_PREFIX = "module_config."


def parse(arguments: Sequence[str]) -> tuple[list[str], RunConfig]:
    """Parses the command line, and the files it names, into positional words and flags.

    Raises:
        UsageError: If a flag is unknown or its value is invalid.
    """
    from absl import flags

    overrides, rest = _split_overrides(config_files.expand(arguments))
    absl_flags = flags.FlagValues()  # A private table; absl's global one is left alone.
    define_flags(absl_flags)
    try:
        words = absl_flags(["tekoa", *rest])
    except flags.Error as error:
        raise UsageError(_explain(error)) from None
    except RecursionError:  # By absl's search for a similar name, if a name is very long.
        longest = max(rest, key=len)
        raise UsageError(
            f"Unknown flag {longest[:40]}... ({len(longest)} characters). "
            "Run `tekoa --help` for a list of flags."
        ) from None
    return words[1:], dataclasses.replace(config_of(absl_flags), overrides=overrides)


def config_of(absl_flags: "flags.FlagValues") -> RunConfig:
    """Returns the values of flags that `define_flags` defined.

    Raises:
        UsageError: If a value is invalid.
    """
    values = {name: _checked_value(name, absl_flags[name].value) for name in FLAG_NAMES}
    set_flags = frozenset(
        name
        for name in FLAG_NAMES
        if absl_flags[name].present or absl_flags[name].value != absl_flags[name].default
    )
    return RunConfig(**values, set_flags=set_flags)


def unused(config: RunConfig, command: str) -> list[str]:
    """Returns the flags set on the command line that a command does not use.

    >>> unused(parse(['--save_every_steps=2', '--model_dir=a'])[1], 'eval')
    ['--save_every_steps']
    """
    return sorted(f"--{name}" for name in config.set_flags if not _is_used(name, command))


def _is_used(name: str, command: str) -> bool:
    return command in (FIELDS[name].metadata["only"] or _MODEL_COMMANDS)


def help_text(command: str | None = None) -> str:
    """Lists the flags of a command, or all flags, with their defaults."""
    rows = {
        name: field.metadata["help"] + _default_text(field.default)
        for name, field in FIELDS.items()
        if command is None or _is_used(name, command)
    }
    if command is None or command in _MODEL_COMMANDS:
        rows["module_config.NAME=VALUE"] = "change setting NAME of the model"
        rows |= {f"{name}=FILE": text for name, text in config_files.FILE_FLAGS.items()}
    width = max(map(len, rows), default=0)
    return "\n".join(f"  --{name:<{width}}  {text}" for name, text in rows.items())


def _default_text(default: Any) -> str:
    if default in (None, (), False):
        return ""
    return f" (default: {'true' if default is True else default})"


def _split_overrides(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separates `--module_config.a.b=v` and `--module_config.a.b v` from other arguments."""
    overrides, rest = {}, []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, text = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not name.startswith(_PREFIX):
            rest.append(argument)
            continue
        value = text if equals else next(remaining, None)
        if value is None:
            raise UsageError(f"{argument} needs a value: {argument}=VALUE.")
        overrides[name.removeprefix(_PREFIX)] = value
    return overrides, rest


def define_flags(absl_flags: "flags.FlagValues") -> None:
    """Defines the flags of the command in a table of absl, except those that it has already."""
    from absl import flags

    define = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
        tuple: flags.DEFINE_list,
    }
    for name, field in FIELDS.items():
        if name in absl_flags:
            continue
        kind = _kind(name)
        default = [] if kind is tuple else field.default
        minimum, maximum = field.metadata["range"]
        limits = {"lower_bound": minimum, "upper_bound": maximum} if kind in (int, float) else {}
        define[kind](name, default, field.metadata["help"], flag_values=absl_flags, **limits)


def _type_of(name: str) -> Any:
    """Returns the type of a flag without `| None`."""
    hint = FIELDS[name].type
    return get_args(hint)[0] if type(None) in get_args(hint) else hint


def _kind(name: str) -> Any:
    """Returns the class of a flag's values."""
    hint = _type_of(name)
    return {Literal: str, None: hint}.get(get_origin(hint), get_origin(hint))


def _checked_value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        # A program may set several patterns as a list.
        return tuple(value) if _kind(name) is tuple else ",".join(value)
    if isinstance(value, float) and math.isnan(value):  # It is within any limits of absl.
        raise UsageError(f"--{name} must be a number, got {value}.")
    if not isinstance(value, str):
        return value
    value = _OLD_VALUES.get((name, value), value)
    if name in _PATHS and value is not None:
        _check_path(name, value)
    choices = get_args(_type_of(name))
    if choices and value not in (None, *choices):
        raise UsageError(f"--{name} must be one of {', '.join(choices)}, got {value!r}.")
    return value


def _check_path(name: str, value: str) -> None:
    """Raises UsageError if the value cannot be used, before anything is imported or created."""
    try:
        if name in _URLS and urls.is_url(value):
            if urls.clean_url(value).startswith("memory:"):
                raise UsageError(
                    f"--{name}={value}: memory:// is part of this process and ends with it. Use a "
                    "directory, s3:// or gs://."
                )
        else:
            files.local_path(value)
    except files.PathError as error:
        raise UsageError(f"--{name}: {error}") from None


def _explain(error: "flags.Error") -> str:
    from absl import flags

    if isinstance(error, flags.UnrecognizedFlagError):
        names = (*FLAG_NAMES, *config_files.FILE_FLAGS)
        hint = did_you_mean(error.flagname, names, n=3, prefix="--", elsewhere=_ELSEWHERE)
        return f"Unknown flag --{error.flagname}.{hint} Run `tekoa --help` for a list of flags."
    illegal = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
    if illegal is None:
        return f"{error}."
    name, value = illegal.groups()
    minimum, maximum = FIELDS[name].metadata["range"]
    kind = {int: "an integer", float: "a number", bool: "true or false"}[_kind(name)]
    if maximum is not None:
        kind += f" from {minimum} to {maximum}"
    elif minimum is not None:
        kind += f" of at least {minimum}"
    return f"--{name} must be {kind}, got {value!r}."
