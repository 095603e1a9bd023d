"""The flags of the command: one table, parsed into one frozen record. Imports no JAX."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from absl import flags

from tekoa.core import files
from tekoa.core.messages import did_you_mean


class UsageError(Exception):
    """A mistake in how the command is used, reported without a traceback."""

    exit_code = 2


def _flag(
    default: Any,
    text: str,
    only: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Defines a flag of the commands in `only`; of all commands that run a model if empty."""
    metadata = {"help": text, "only": only.split(), "range": (least, most)}
    return dataclasses.field(default=default, metadata=metadata)


_BATCH = "rows per batch, across all devices"
_EXAMPLES = "examples to use; -1 for all"
_ON_DEVICES = "train eval eval_wait predict plan"
_ADAPTED = "train eval eval_wait predict plan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The flags of one run of the command; a `Literal` lists the values of a flag.

    Attributes:
        overrides: Settings of the model, given as `--module_config.NAME=VALUE`.
        given: Names of the flags that were set on the command line.
    """

    module_imp: str | None = _flag(None, "the model: a bundled name, a module or a .py file")
    module_config: str | None = _flag(None, "file with get_config, if not the model file")
    model_dir: str | None = _flag(None, "directory of the run")
    checkpoint_path: str | None = _flag(
        None, "checkpoint to start from, evaluate or predict with", "train eval eval_wait predict"
    )
    mode: Literal["train", "eval_once", "eval_wait", "predict"] | None = _flag(
        None, "train, eval_once, eval_wait or predict, if no command is given"
    )
    dry_run: bool = _flag(
        False,
        "compile and read a few batches, but write nothing to disk",
        "train eval eval_wait predict",
    )
    max_train_steps: int | None = _flag(
        None, "step at which training ends", "train eval_wait", least=0
    )
    train_epochs: int | None = _flag(
        None, "passes over the training data; unlimited if not set", "train", least=1
    )
    random_seed: int | None = _flag(
        None, "seed of the run; chosen and stored if not set", "train", least=0
    )
    train_pattern: str | None = _flag(None, "training data, comma-separated", "train scales plan")
    valid_pattern: str | None = _flag(None, "data to validate on during training", "train")
    eval_pattern: str | None = _flag(None, "data to evaluate on", "eval eval_wait")
    pred_pattern: str | None = _flag(None, "data to predict on", "predict")
    train_batch_size: int = _flag(64, _BATCH, "train scales plan", least=1)
    valid_batch_size: int = _flag(64, _BATCH, "train", least=1)
    eval_batch_size: int = _flag(256, _BATCH, "eval eval_wait", least=1)
    pred_batch_size: int = _flag(256, _BATCH, "predict", least=1)
    pred_output: str | None = _flag(
        None, "file for the predictions; standard output if not set", "predict"
    )
    num_valid_examples: int = _flag(-1, _EXAMPLES, "train", least=-1)
    num_eval_examples: int = _flag(-1, _EXAMPLES, "eval eval_wait", least=-1)
    num_pred_examples: int = _flag(-1, _EXAMPLES, "predict", least=-1)
    train_shuffle_buf: int | None = _flag(
        None, "shuffle the data; streams are shuffled in windows of N rows", "train", least=1
    )
    train_consecutive: int | None = _flag(
        None, "length of runs of consecutive batches", "train", least=1
    )
    train_load_step: bool = _flag(
        False,
        "also load the step from --checkpoint_path; inside --model_dir, rewind to it",
        "train",
    )
    allow_mismatch: bool = _flag(
        False, "keep initial values where --checkpoint_path does not match", "train"
    )
    allow_data_changes: bool = _flag(
        False, "resume even if data, seed or batch size have changed", "train"
    )
    check_every_steps: int = _flag(
        1000, "steps between checkpoints, metrics and validations", "train", least=1
    )
    checkpoint_format: Literal["native", "t5x"] = _flag(
        "native", "native, or t5x for use with T5X", "train"
    )
    max_ckpt: int = _flag(10, "checkpoints to keep", "train", least=1)
    save_every_steps: int | None = _flag(
        None, "steps between permanent copies in MODEL_DIR/save", "train", least=1
    )
    max_save: int = _flag(3, "best checkpoints to keep per metric", "train eval_wait", least=1)
    profiler_port: int | None = _flag(
        None, "port for a profiler server during training", "train", least=1, most=65535
    )
    eval_label: str = _flag(
        "eval", "subdirectory and TensorBoard label of this evaluator", "eval_wait"
    )
    check_ckpt_every_secs: int = _flag(
        60, "seconds between checks for new checkpoints", "eval_wait", least=0
    )
    save_high: tuple[str, ...] = _flag(
        (), "keep the checkpoints highest in these metrics", "train eval_wait"
    )
    save_low: tuple[str, ...] = _flag(
        (), "keep the checkpoints lowest in these metrics", "train eval_wait"
    )
    early_stop: str | None = _flag(
        None, "stop after N validations without improvement: METRIC:N, or METRIC:N:max", "train"
    )
    ema: float | None = _flag(
        None, "decay of the moving average of the parameters", "train plan", least=0, most=1
    )
    optimizer: str | None = _flag(
        None,
        "optimizer in place of the model's: auto, sphere, muon, amos or one of optax",
        "train plan",
    )
    learning_rate: float | None = _flag(None, "rate of the --optimizer", "train plan", least=0)
    param_groups: str | None = _flag(
        None,
        "other rates by pattern, or freeze: 'bias$=0.01; ^embed=freeze'",
        "train plan",
    )
    lora_rank: int | None = _flag(
        None, "train low-rank adapters of this rank in place of the weights", _ADAPTED, least=1
    )
    lora_where: str | None = _flag(None, "pattern over the weights to adapt", _ADAPTED)
    lora_alpha: float | None = _flag(
        None, "scale of the adapters, divided by their rank", _ADAPTED, least=0
    )
    lora_base: str | None = _flag(
        None, "checkpoint with the trained weights to adapt", "train plan"
    )
    accumulate: int = _flag(1, "microbatches per update", "train plan", least=1)
    precision: Literal["float32", "bf16"] = _flag(
        "float32", "float32, or bf16 to compute in bfloat16", "train plan"
    )
    on_nan: Literal["stop", "skip", "count", "ignore"] = _flag(
        "stop", "what to do on NaN or Inf: stop, skip, count or ignore", "train"
    )
    on_slow_save: Literal["wait", "skip"] = _flag(
        "wait", "if the previous save has not ended: wait for it, or skip the new one", "train"
    )
    grace_seconds: float = _flag(
        60.0, "how long to wait for a save to end after a stop signal", "train", least=0
    )
    steps_per_dispatch: str = _flag("auto", "steps sent to the device at once, or auto", "train")
    mesh: str | None = _flag(None, "sizes of mesh axes, such as data=2,model=4", _ON_DEVICES)
    num_partitions: int = _flag(1, "size of the mesh's model axis", _ON_DEVICES, least=1)
    model_parallel_submesh: tuple[str, ...] = _flag(
        (), "shape of the model axis on the hardware, such as 2,2,1,1", _ON_DEVICES
    )
    sharding_rules: str | None = _flag(
        None, "how parameters are split: PATTERN=AXES; ...", _ON_DEVICES
    )
    optimizer_rules: str | None = _flag(
        None, "how the optimizer state is split: a mesh axis, or rules", _ON_DEVICES
    )
    device_memory: str | None = _flag(None, "memory of a device, such as 16GB", "plan")
    compile_cache: str | None = _flag(
        None, "directory for compiled programs, or off; in ~/.cache if not set"
    )
    profile_steps: str | None = _flag(
        None, "profile COUNT steps starting at step FIRST, given as FIRST:COUNT", "train"
    )
    progress: bool = _flag(True, "show a progress bar; --noprogress hides it", "train")
    to: Literal["native", "t5x"] | None = _flag(
        None, "format that `tekoa convert` writes: native or t5x", "convert"
    )
    out: str | None = _flag(None, "file that `tekoa page` writes; - for standard output", "page")
    json: bool = _flag(
        False, "print nothing but lines of JSON to standard output", "train eval eval_wait"
    )
    coordinator_address: str | None = _flag(
        None, "HOST:PORT of process 0, or auto to detect a cluster"
    )
    num_processes: int | None = _flag(None, "number of processes in the run", least=1)
    process_id: int | None = _flag(None, "index of this process, counted from 0", least=0)
    host_timeout_secs: int = _flag(
        60, "seconds without a heartbeat before a process is considered hung", least=2
    )
    logtostderr: bool = _flag(True, "ignored; logs always go to standard error")
    compat: Literal["jestimator"] | None = _flag(
        None, "jestimator: run model files that import jestimator unchanged"
    )
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    given: frozenset[str] = frozenset()

    def with_defaults(self, defaults: Mapping[str, Any]) -> "RunConfig":
        """Returns a copy with new defaults for the flags not set on the command line."""
        unset = {name: value for name, value in defaults.items() if name not in self.given}
        return dataclasses.replace(self, **unset)


_FIELDS = {field.name: field for field in dataclasses.fields(RunConfig) if field.metadata}
FLAG_NAMES = tuple(_FIELDS)

_OLD_VALUES = {("to", "tekoa"): "native"}
_PATHS = ("model_dir", "checkpoint_path", "lora_base", "pred_output", "compile_cache", "out")
_MODEL_COMMANDS = ("train", "eval", "eval_wait", "predict", "scales", "plan")
_PREFIX = "module_config."


def parse(arguments: Sequence[str]) -> tuple[list[str], RunConfig]:
    """Parses the command line and returns its positional words and its flags.

    Raises:
        UsageError: If a flag is unknown or its value is invalid.
    """
    overrides, rest = _split_overrides(arguments)
    absl_flags = flags.FlagValues()  # A private table; absl's global one is left alone.
    define_flags(absl_flags)
    try:
        words = absl_flags(["tekoa", *rest])
    except flags.Error as error:
        raise UsageError(_explain(error)) from None
    return words[1:], dataclasses.replace(config_of(absl_flags), overrides=overrides)


def config_of(absl_flags: flags.FlagValues) -> RunConfig:
    """Returns the values of flags that `define_flags` defined.

    Raises:
        UsageError: If a value is invalid.
    """
    values = {name: _checked_value(name, absl_flags[name].value) for name in FLAG_NAMES}
    given = frozenset(
        name
        for name in FLAG_NAMES
        if absl_flags[name].present or absl_flags[name].value != absl_flags[name].default
    )
    return RunConfig(**values, given=given)


def unused(config: RunConfig, command: str) -> list[str]:
    """Returns the flags set on the command line that a command does not use.

    >>> unused(parse(['--save_every_steps=2', '--model_dir=a'])[1], 'eval')
    ['--save_every_steps']
    """
    return sorted(f"--{name}" for name in config.given if not _is_used(name, command))


def _is_used(name: str, command: str) -> bool:
    return command in (_FIELDS[name].metadata["only"] or _MODEL_COMMANDS)


def help_text(command: str | None = None) -> str:
    """Lists the flags of a command, or all flags, with their defaults."""
    rows = {
        name: field.metadata["help"] + _default_text(field.default)
        for name, field in _FIELDS.items()
        if command is None or _is_used(name, command)
    }
    if command is None or command in _MODEL_COMMANDS:
        rows["module_config.NAME=VALUE"] = "change setting NAME of the model"
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


def define_flags(absl_flags: flags.FlagValues) -> None:
    """Defines the flags of the command in a table of absl, except those that it has already."""
    define = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
        tuple: flags.DEFINE_list,
    }
    for name, field in _FIELDS.items():
        if name in absl_flags:
            continue
        kind = _kind(name)
        default = [] if kind is tuple else field.default
        minimum, maximum = field.metadata["range"]
        limits = {"lower_bound": minimum, "upper_bound": maximum} if kind in (int, float) else {}
        define[kind](name, default, field.metadata["help"], flag_values=absl_flags, **limits)


def _type_of(name: str) -> Any:
    """Returns the type of a flag without `| None`."""
    hint = _FIELDS[name].type
    return get_args(hint)[0] if type(None) in get_args(hint) else hint


def _kind(name: str) -> Any:
    """Returns the class of a flag's values."""
    hint = _type_of(name)
    return {Literal: str, None: hint}.get(get_origin(hint), get_origin(hint))


def _checked_value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        # A program may set several patterns as a list.
        return tuple(value) if _kind(name) is tuple else ",".join(value)
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
    """Raises UsageError if the value is a URL, before anything is imported or created."""
    try:
        files.local_path(value)
    except files.PathError as error:
        raise UsageError(f"--{name}: {error}") from None


def _explain(error: flags.Error) -> str:
    if isinstance(error, flags.UnrecognizedFlagError):
        hint = did_you_mean(error.flagname, FLAG_NAMES, n=3, prefix="--")
        return f"Unknown flag --{error.flagname}.{hint} Run `tekoa --help` for a list of flags."
    illegal = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
    if illegal is None:
        return f"{error}."
    name, value = illegal.groups()
    minimum, maximum = _FIELDS[name].metadata["range"]
    kind = {int: "an integer", float: "a number", bool: "true or false"}[_kind(name)]
    if maximum is not None:
        kind += f" from {minimum} to {maximum}"
    elif minimum is not None:
        kind += f" of at least {minimum}"
    return f"--{name} must be {kind}, got {value!r}."
