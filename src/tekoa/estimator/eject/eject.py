"""`tekoa eject` writes a run as one plain Python file, without Tekoa.

The file needs JAX, NumPy, optax and the library of the model. It contains the model, the optimizer
with its settings, and the training step, and its losses have the bits of the run on the same
device with the same versions. The examples are written beside it, as .npz.

Flags:
  --out=FILE  the file to write (default: NAME.py, where NAME is that of the run's directory); an
              existing one is replaced only if this command wrote it
  --steps=N   store the examples of the first N steps (default: those of all steps of the run)

Example: tekoa eject runs/mnist --out=mnist_plain.py
"""

import os
import pathlib
from collections.abc import Sequence

from tekoa.core import files
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.cli.run_config import FIELDS, RunConfig
from tekoa.estimator.eject import document, examples, forms
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.replay import arguments as arguments_lib
from tekoa.estimator.replay.record import Start
from tekoa.estimator.replay.segment import Replayer
from tekoa.estimator.run import run as runs
from tekoa.store.commit import durable

USAGE = "tekoa eject RUN [--out=FILE] [--steps=N]"

# Flags that the ejected file follows, or that do not change the steps of training.
_ALLOWED = {
    *("module_imp", "module_config", "model_dir", "mode", "dry_run", "check", "again", "compat"),
    *("max_train_steps", "train_epochs", "random_seed", "train_pattern", "valid_pattern"),
    *("eval_pattern", "pred_pattern", "train_batch_size", "valid_batch_size", "eval_batch_size"),
    *("pred_batch_size", "pred_output", "num_valid_examples", "num_eval_examples"),
    *("num_pred_examples", "train_shuffle_buf", "train_consecutive", "data_workers"),
    *("check_every_steps", "checkpoint_format", "max_ckpt", "save_every_steps", "max_save"),
    *("profiler_port", "eval_label", "check_ckpt_every_secs", "save_high", "save_low"),
    *("early_stop", "ema", "optimizer", "learning_rate", "clip_norm", "on_slow_save"),
    *("grace_seconds",),
    *("steps_per_dispatch", "device_memory", "compile_cache", "profile_steps", "log_norms"),
    *("peak_flops", "track", "track_project", "progress", "json", "host_timeout_secs"),
    *("logtostderr", "allow_mismatch", "allow_data_changes", "valid_sets"),
}


def eject(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    n_steps: int | None = None,
) -> pathlib.Path:
    """Writes a run of `tekoa train` as one plain Python file, and its examples beside it.

    Args:
        directory: The directory of the run, which does not change.
        out: The file to write; by default NAME.py in the working directory.
        n_steps: The number of steps whose examples are stored; by default all of the run.

    Returns:
        The file.

    Raises:
        UsageError: If the run uses something that has no plain equivalent; it says what.

    >>> eject('runs/none')
    Traceback (most recent call last):
        ...
    tekoa.estimator.cli.run_config.UsageError: ...runs/none has no run.json: it is not ...
    """
    replayer = Replayer(directory)
    assert replayer.record is not None
    start = replayer.record.starts[0]
    target = pathlib.Path(f"{replayer.directory.name}.py") if out is None else files.local_path(out)
    _check_target(target)
    run = runs.open_run(start.config())
    _check_flags(run.config, start)
    program = program_of(run, "train")
    if n_steps is None:
        n_steps = int(start.facts.get("n_steps") or max(replayer.stored, default=1))
    stored = examples.read(program.train_batches(start.seed), max(1, n_steps))
    saved = next((replayer.facts(step) for step in sorted(replayer.stored)), {})
    parts = forms.plain_parts(run, program, start, saved.get("optimizer"))
    sections = {"Data": [stored.code()], **parts.sections}
    code = document.write(run, start, sections, imports=parts.imports, n_steps=len(stored.order))
    stored.save(target.with_suffix(".npz"))
    durable.replace(target, code.encode())
    return target


def run_eject(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    parser = arguments_lib.Arguments("eject", "RUN")
    parser.add_argument("--out")
    parser.add_argument("--steps", type=arguments_lib.step)
    parsed = parser.parse(arguments)
    target = eject(parsed.RUN, parsed.out, n_steps=parsed.steps)
    n_lines = len(target.read_text().splitlines())
    print(f"Wrote {target} ({n_lines} lines) and its data, {target.with_suffix('.npz')}.")
    return 0


def _check_target(target: pathlib.Path) -> None:
    """Raises if a file cannot be written, or would replace one of the user's, such as a model."""
    if target.suffix != ".py":
        raise UsageError(f"--out={target} must end with .py.")
    if target.exists() and not document.is_ejected(target.read_text(errors="replace")):
        raise UsageError(
            f"{target} exists, and was not {document.AUTHOR}. Name another file with --out."
        )


def _check_flags(config: RunConfig, start: Start) -> None:
    """Raises if a flag changes the steps in a way that the plain file does not have."""
    recorded = {**vars(config), **start.facts["flags"]}
    changed = [
        name
        for name, field in FIELDS.items()
        if name not in _ALLOWED and (recorded.get(name) or None) != (field.default or None)
    ]
    if changed:
        flags = ", ".join(f"--{name}={recorded[name]}" for name in changed)
        raise UsageError(
            f"{start.directory} was trained with {flags}, which has no plain equivalent, so that "
            "it cannot be ejected. Runs without such flags can."
        )
