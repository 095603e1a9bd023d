"""The flags of the command as one frozen record. Imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


class UsageError(Exception):
    """A mistake in how the command is used, reported without a traceback.

    A model file may raise it, too.

    >>> raise UsageError('--module_config.width must be even, got 3.')
    Traceback (most recent call last):
    ...
    tekoa.estimator.cli.run_config.UsageError: --module_config.width must be even, got 3.
    """

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
        set_flags: Names of the flags that were set on the command line.
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
    check: bool = _flag(
        False, "train a few steps around the default of auto and draw the losses", "scales"
    )
    again: str | None = _flag(
        None, "directory of a run to repeat, with the flags and the model of its record", "train"
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
    valid_sets: str | None = _flag(
        None,
        "more validation data by name, every N checks: 'NAME=PATTERN; NAME:N=PATTERN'",
        "train",
    )
    eval_pattern: str | None = _flag(None, "data to evaluate on", "eval eval_wait")
    pred_pattern: str | None = _flag(None, "data to predict on", "predict")
    train_batch_size: int = _flag(64, _BATCH, "train scales plan", least=1)
    batch_schedule: str | None = _flag(
        None, "rows per batch from later steps on, such as 1000:128,5000:256", "train"
    )
    length_schedule: str | None = _flag(
        None, "length of sequences from a step on, such as 0:16,1000:64", "train"
    )
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
    data_workers: int = _flag(
        0,
        "processes that read and map training data ahead; for slow map functions",
        "train",
        least=0,
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
    stop_when: str | None = _flag(
        None, "stop once a validation metric reaches a value, such as 'accuracy>=0.99'", "train"
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
    unfreeze_at: str | None = _flag(
        None, "steps before parameters begin to train: '^embed=500; bias$=100'", "train"
    )
    freeze_at: str | None = _flag(
        None, "steps after which parameters are frozen: '^embed=500; bias$=100'", "train"
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
    precision: Literal["float32", "bf16", "fp16"] = _flag(
        "float32",
        "float32, bf16 to compute in bfloat16, or fp16 in float16 with a scaled loss",
        "train plan",
    )
    remat: Literal["dots", "everything"] | None = _flag(
        None,
        "activations to compute again to save memory: everything, or all but dots",
        "train plan",
    )
    clip_norm: float | None = _flag(
        None, "scale gradients down if their norm is larger", "train plan", least=0
    )
    grad_noise: float | None = _flag(
        None, "standard deviation of noise on the gradients", "train plan", least=0
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
    log_norms: bool = _flag(
        False, "log the norms of every parameter, its gradient and its update", "train"
    )
    peak_flops: float | None = _flag(
        None, "most FLOPs per second of a device, to log utilisation if it is not known", "train"
    )
    sample_every: int | None = _flag(
        None, "steps between texts that a language model writes", "train", least=1
    )
    sample_prompt: str = _flag("", "the text that samples continue", "train")
    sample_tokens: int = _flag(64, "tokens of a sample", "train", least=1)
    sample_temperature: float = _flag(
        1.0, "divides the logits of samples; 0 always chooses the likeliest token", "train", least=0
    )
    sample_top_p: float = _flag(
        1.0, "draw samples from the likeliest tokens of this total probability", "train", most=1
    )
    track: tuple[str, ...] = _flag((), "also send metrics to these: wandb, mlflow, csv", "train")
    track_project: str | None = _flag(
        None, "project of W&B, experiment of MLflow; the model's name if not set", "train"
    )
    progress: bool = _flag(True, "show a progress bar; --noprogress hides it", "train")
    library: Literal["nnx", "linen", "equinox"] | None = _flag(
        None, "library of the model that `tekoa new` writes; nnx if not set", "new"
    )
    long: bool = _flag(False, "write a model file in the long form, for Linen", "new")
    to: Literal["native", "t5x", "safetensors", "numpy", "orbax", "stablehlo", "onnx"] | None = (
        _flag(
            None,
            "format to write: native or t5x (convert); safetensors, numpy, orbax, stablehlo, onnx "
            "(export)",
            "convert export",
        )
    )
    out: str | None = _flag(None, "file to write; - for standard output (page)", "page export")
    names: Literal["torch", "native"] | None = _flag(
        None, "names and axes of exported weights: those of torch, or the model's own", "export"
    )
    export_batch_size: int | None = _flag(
        None, "rows in a call of the exported program; any number if not set", "export", least=1
    )
    serve: bool = _flag(
        False, "serve the page on this machine and refresh it during training", "page"
    )
    port: int = _flag(8642, "port for --serve; 0 chooses a free one", "page", least=0, most=65535)
    verify: bool = _flag(False, "verify the checksums of checkpoints, not only sizes", "page")
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
    set_flags: frozenset[str] = frozenset()

    def with_defaults(self, defaults: Mapping[str, Any]) -> "RunConfig":
        """Returns a copy with new defaults for the flags not set on the command line."""
        unset = {name: value for name, value in defaults.items() if name not in self.set_flags}
        return dataclasses.replace(self, **unset)


FIELDS = {field.name: field for field in dataclasses.fields(RunConfig) if field.metadata}
FLAG_NAMES = tuple(FIELDS)
