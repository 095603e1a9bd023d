"""The flags of the command: one table, read into one frozen record.

Nothing here imports JAX: help and mistakes are answered at once.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from absl import flags


class UsageError(Exception):
    """A mistake of the command's user; shown as one message, without a traceback."""

    exit_code = 2


def _flag(
    default: Any,
    text: str,
    *,
    only: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A flag: its default, its line of help, the commands that take it, what it may be."""
    facts = {"help": text, "only": only.split(), "choices": choices, "range": (least, most)}
    return dataclasses.field(default=default, metadata=facts)


_ON_DEVICES = "train eval eval_wait predict plan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What one run of the command was told.

    Attributes:
        overrides: Settings of the model given as `--module_config.NAME=VALUE`.
        given: Names of the flags that were set on the command line.
    """

    module_imp: str | None = _flag(None, "the model: a bundled name, a module or a .py file")
    module_config: str | None = _flag(None, "file with get_config; the model's own by default")
    model_dir: str | None = _flag(None, "directory of the run")
    checkpoint_path: str | None = _flag(
        None, "start, evaluate or predict with this checkpoint, of any format"
    )
    mode: str | None = _flag(
        None,
        "train, eval_once, eval_wait or predict; else by the flags",
        choices=("train", "eval_once", "eval_wait", "predict"),
    )
    dry_run: bool = _flag(False, "compile and read some data; change nothing on disk")
    max_train_steps: int | None = _flag(
        None, "where training ends", only="train eval_wait", least=0
    )
    train_epochs: int | None = _flag(
        None, "passes over the data; None: repeat for ever", only="train", least=1
    )
    random_seed: int | None = _flag(
        None, "drawn once and stored with the run if not given", only="train", least=0
    )
    train_pattern: str | None = _flag(
        None, "data to train on, comma-separated", only="train scales plan"
    )
    valid_pattern: str | None = _flag(None, "data to validate on while training", only="train")
    eval_pattern: str | None = _flag(None, "data to evaluate on", only="eval eval_wait")
    pred_pattern: str | None = _flag(None, "data to predict", only="predict")
    train_batch_size: int = _flag(
        64, "rows of a batch, over all devices", only="train scales plan", least=1
    )
    valid_batch_size: int = _flag(64, "rows of a batch, over all devices", only="train", least=1)
    eval_batch_size: int = _flag(
        256, "rows of a batch, over all devices", only="eval eval_wait", least=1
    )
    pred_batch_size: int = _flag(256, "rows of a batch, over all devices", only="predict", least=1)
    pred_output: str | None = _flag(
        None, "file for predictions; standard output if not given", only="predict"
    )
    num_valid_examples: int = _flag(-1, "how many to take; -1: all", only="train", least=-1)
    num_eval_examples: int = _flag(-1, "how many to take; -1: all", only="eval eval_wait", least=-1)
    num_pred_examples: int = _flag(-1, "how many to take; -1: all", only="predict", least=-1)
    train_shuffle_buf: int | None = _flag(
        None, "shuffle; None keeps the order", only="train", least=1
    )
    train_consecutive: int | None = _flag(
        None, "every n batches are consecutive", only="train", least=1
    )
    train_load_step: bool = _flag(
        False, "take the step too when starting from --checkpoint_path", only="train"
    )
    allow_mismatch: bool = _flag(
        False, "what does not fit of --checkpoint_path is left as initialised", only="train"
    )
    allow_data_changes: bool = _flag(
        False,
        "go on though source, seed or batch size are not those of the run so far",
        only="train",
    )
    check_every_steps: int = _flag(
        1000, "checkpoint, metrics and validation every n steps", only="train", least=1
    )
    checkpoint_format: str = _flag(
        "native",
        "native, or t5x for checkpoints that T5X can read",
        choices=("native", "t5x"),
        only="train",
    )
    max_ckpt: int = _flag(10, "how many of those checkpoints to keep", only="train", least=1)
    save_every_steps: int | None = _flag(
        None, "keep a copy under model_dir/save every n steps", only="train", least=1
    )
    max_save: int = _flag(
        3, "how many best checkpoints to keep per metric", only="eval_wait", least=1
    )
    profiler_port: int | None = _flag(
        None, "port of a profiler server while training", only="train", least=1, most=65535
    )
    eval_label: str = _flag(
        "eval", "sub-directory and TensorBoard label of this evaluator", only="eval_wait"
    )
    check_ckpt_every_secs: int = _flag(
        60, "how often eval_wait looks for checkpoints", only="eval_wait", least=0
    )
    save_high: tuple[str, ...] = _flag(
        (), "metrics whose highest checkpoints are kept", only="eval_wait"
    )
    save_low: tuple[str, ...] = _flag(
        (), "metrics whose lowest checkpoints are kept", only="eval_wait"
    )
    ema: float | None = _flag(
        None, "decay of a moving average of the parameters", only="train plan", least=0, most=1
    )
    accumulate: int = _flag(
        1, "parts in which a batch is run before the one update", only="train plan", least=1
    )
    precision: str = _flag(
        "float32",
        "float32, or bf16 to compute in bfloat16",
        choices=("float32", "bf16"),
        only="train plan",
    )
    on_nan: str = _flag(
        "stop",
        "stop, skip, count or ignore numbers that are not finite",
        choices=("stop", "skip", "count", "ignore"),
        only="train",
    )
    steps_per_dispatch: str = _flag(
        "auto", "steps that go to the device at once, or auto", only="train"
    )
    mesh: str | None = _flag(None, "sizes of the mesh, such as data=2,model=4", only=_ON_DEVICES)
    num_partitions: int = _flag(1, "size of the mesh's model axis", only=_ON_DEVICES, least=1)
    model_parallel_submesh: tuple[str, ...] = _flag((), "its shape: 2,2,1,1", only=_ON_DEVICES)
    sharding_rules: str | None = _flag(None, "splits parameters: NAME=AXES; ...", only=_ON_DEVICES)
    optimizer_rules: str | None = _flag(None, "splits slots: data, or rules", only=_ON_DEVICES)
    device_memory: str | None = _flag(None, "what a device has, such as 16GB", only="plan")
    compile_cache: str | None = _flag(
        None, "where compiled programs are kept, or off; the user's cache directory if not given"
    )
    profile_steps: str | None = _flag(
        None, "record a trace of COUNT steps from step FIRST: FIRST:COUNT", only="train"
    )
    progress: bool = _flag(True, "show a progress bar", only="train")
    to: str | None = _flag(
        None,
        "format that `tekoa convert` writes: t5x or tekoa",
        choices=("t5x", "tekoa"),
        only="convert",
    )
    out: str | None = _flag(
        None, "file that `tekoa page` writes; - for standard output", only="page"
    )
    json: bool = _flag(False, "print metrics as one line of JSON", only="train eval eval_wait")
    coordinator_address: str | None = _flag(
        None, "host:port of process 0 of several, or auto: as the cluster says"
    )
    num_processes: int | None = _flag(None, "how many processes run this command", least=1)
    process_id: int | None = _flag(None, "the number of this process, from 0", least=0)
    host_timeout_secs: int = _flag(
        60, "silence after which another process counts as stuck", least=2
    )
    logtostderr: bool = _flag(True, "accepted and not needed: logs go to standard error")
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    given: frozenset[str] = frozenset()

    def with_defaults(self, defaults: Mapping[str, Any]) -> "RunConfig":
        """Fills in what was not given on the command line."""
        missing = {name: v for name, v in defaults.items() if name not in self.given}
        return dataclasses.replace(self, **missing)


def parse(arguments: Sequence[str]) -> tuple[list[str], RunConfig]:
    """Reads flags; gives the words that are no flags, and the record.

    Raises:
        UsageError: If a flag is not known or its value is of the wrong type.
    """
    overrides, rest = _overrides(arguments)
    values = _flag_values()
    try:
        words = values(["tekoa", *rest])
    except flags.Error as error:
        raise UsageError(_explained(error)) from None
    given = frozenset(name for name in FLAG_NAMES if values[name].present)
    record = {name: _frozen(values[name].value) for name in FLAG_NAMES}
    _check_choices(record)
    return words[1:], RunConfig(**record, overrides=overrides, given=given)


def _check_choices(record: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(RunConfig):
        choices = field.metadata.get("choices")
        value = record.get(field.name)
        if choices and value is not None and value not in choices:
            raise UsageError(f"--{field.name} must be one of {', '.join(choices)}, got {value!r}.")


def help_text(command: str | None = None) -> str:
    """Lists the flags of a command with their defaults; of all commands if none is named."""
    width = max(len(name) for name in FLAG_NAMES)
    lines = [
        f"  --{field.name:<{width}}  {field.metadata['help']}"
        + ("" if field.default in (None, ()) else f" (default {field.default})")
        for field in dataclasses.fields(RunConfig)
        if field.metadata and (command is None or command in (field.metadata["only"] or _OF_MODELS))
    ]
    if command not in (None, *_OF_MODELS):
        return "\n".join(lines)
    return "\n".join([*lines, "  --module_config.NAME=VALUE  a setting of the model itself"])


FLAG_NAMES = tuple(field.name for field in dataclasses.fields(RunConfig) if field.metadata)

_OF_MODELS = ("train", "eval", "eval_wait", "predict", "scales", "plan")
_PREFIX = "module_config."


def _overrides(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Takes `--module_config.a.b=v` and `--module_config.a.b v` out, wherever they stand."""
    overrides, rest = {}, []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        bare = argument.lstrip("-")
        if not argument.startswith("-") or not bare.startswith(_PREFIX):
            rest.append(argument)
            continue
        name, equals, text = bare.removeprefix(_PREFIX).partition("=")
        if not equals:
            if not remaining:
                raise UsageError(f"{argument} needs a value: {argument}=VALUE.")
            text = remaining.pop(0)
        overrides[name] = text
    return overrides, rest


def _flag_values() -> flags.FlagValues:
    """Defines the flags on a private table: absl's global one is left alone."""
    values = flags.FlagValues()
    hints = get_type_hints(RunConfig)
    define = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
        tuple: flags.DEFINE_list,
    }
    for field in dataclasses.fields(RunConfig):
        if field.metadata:
            default: Any = field.default
            kind = tuple if default == () else _kind(hints[field.name])
            default = [] if kind is tuple else default
            least, most = field.metadata["range"]
            limits = {"lower_bound": least, "upper_bound": most} if kind in (int, float) else {}
            define[kind](field.name, default, field.metadata["help"], flag_values=values, **limits)
    return values


def _kind(hint: Any) -> type:
    """The type in `X` and in `X | None`."""
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _explained(error: flags.Error) -> str:
    if not isinstance(error, flags.UnrecognizedFlagError):
        return f"{error}"
    close = difflib.get_close_matches(error.flagname, FLAG_NAMES, n=3)
    hint = f" Did you mean {' or '.join('--' + name for name in close)}?" if close else ""
    return f"Unknown flag --{error.flagname}.{hint} `tekoa --help` lists all flags."
