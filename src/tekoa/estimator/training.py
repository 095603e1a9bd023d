"""The mode that trains."""

import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tekoa.core import guard, hosts
from tekoa.estimator import checks, dry_run, mesh, start
from tekoa.estimator import run as runs
from tekoa.estimator.config import RunConfig, UsageError
from tekoa.estimator.program import Program, program_of
from tekoa.extensions import base, files, profiler, progress, tensorboard
from tekoa.loop import feed, train
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary
from tekoa.loop.task import StopFlag
from tekoa.optim import amos
from tekoa.store import leaves, names, signals

KEEP_ALL = 10**9
# Of a checkpoint whose validation was given up; the next start makes up for it.
_OWED = "is_validation_owed"


def run_train(config: RunConfig) -> int:
    """Trains a model; gives the exit code."""
    run = runs.open_run(config)
    program = program_of(run, "train")
    with runs.unless_refused(run):
        return _train(run, program)


def _train(run: runs.Run, program: Program) -> int:
    seed = runs.choose_seed(run)
    config = run.config
    with signals.stop_flag() as stop_flag, contextlib.ExitStack() as stack:
        scales = stack.enter_context(amos.recorded_scales())
        if config.dry_run:
            return dry_run.train(lambda: _train_loop(program, run, seed, stop_flag), program)
        _say_start(run)
        if config.profiler_port is not None:
            jax.profiler.start_server(config.profiler_port)
        trace = _step_trace(run, stop_flag, stack)
        loop = _train_loop(program, run, seed, trace or stop_flag)
        if trace is not None:
            trace.step = lambda: loop.step
        validation = program.validation(loop, stop_flag)
        keeper = _writer(run, run.model_dir, keep=config.max_ckpt)
        stack.enter_context(contextlib.closing(keeper))
        runs.start_training(run, seed, n_steps=loop.n_steps, scales=scales)
        stages = list(_stages(run, _unless_stopping(validation, run, stop_flag), loop, stack))
        last = None
        try:
            last = _begin(run, loop, stages, keeper)
            # An earlier run may have been told to go further than this one.
            is_left = loop.n_steps is None or loop.step < loop.n_steps
            due = checks.checks(
                loop,
                check_every=config.check_every_steps,
                save_every=config.save_every_steps,
                save=_saver(run, stack),
            )
            for checkpoint in due if is_left else ():
                last = _process(checkpoint, stages, keeper)
        except guard.NonFiniteError:
            keeper(loop.checkpoint())
            raise
        except InterruptedError:
            pass  # A validation was given up.
    if stop_flag.is_set():
        print(f"Stopped at step {loop.step}; the same command goes on from there.")
        return signals.EXIT_STOPPED
    runs.end_training(run, loop.step)
    _conclude(run, validation, last, loop)
    return 0


def _say_start(run: runs.Run) -> None:
    """Compiling takes seconds: until the first step there is this line to look at."""
    if run.config.progress and hosts.current().is_writer:
        text = f"Training {run.module.__name__} in {run.model_dir}; the first step compiles."
        print(text, file=sys.stderr, flush=True)


def _begin(
    run: runs.Run,
    loop: train.TrainLoop,
    stages: list[base.Stage],
    keeper: files.CheckpointFileWriter,
) -> Checkpoint | None:
    """Saves a state that is not saved yet, or makes up for a validation that was given up."""
    checkpoint = loop.checkpoint()
    is_saved = loop.step in names.list_steps(run.model_dir)
    if not hosts.current().broadcast("is the first checkpoint there", is_saved):
        return base.serial(*stages, keeper)(checkpoint)
    path = names.step_dir(run.model_dir, loop.step)
    if not (path / names.INDEX).exists():
        return None  # Another program's step.
    stored = leaves.read_index(path)
    if not stored.meta.get("facts", {}).get(_OWED):
        return None
    told = {
        name.removeprefix("train/"): value
        for name, value in stored.metrics.items()
        if name.startswith("train/")
    }
    return base.serial(*stages)(as_summary(checkpoint).with_metrics("train", told))


def _process(
    checkpoint: Checkpoint, stages: list[base.Stage], keeper: files.CheckpointFileWriter
) -> Checkpoint:
    """Does all that is due at a check.

    Raises:
        InterruptedError: If the validation was given up; the checkpoint is saved.
    """
    try:
        return base.serial(*stages, keeper)(checkpoint)
    except InterruptedError:
        keeper(dataclasses.replace(checkpoint, facts={**checkpoint.facts, _OWED: True}))
        raise


def _train_loop(program: Program, run: runs.Run, seed: int, stop_flag: StopFlag) -> train.TrainLoop:
    config = run.config
    if config.train_batch_size % config.accumulate:
        raise UsageError(
            f"--accumulate={config.accumulate} must divide --train_batch_size="
            f"{config.train_batch_size}."
        )
    batches = program.train_batches(seed)
    position = feed.position(batches)
    return program.train_loop(
        lambda model, optimizer: start.StartReader(
            run, model, optimizer=optimizer, data_state=position
        ),
        data=batches,
        layout=mesh.layout_of(run),
        n_steps=_n_steps(config, batches),
        n_steps_per_checkpoint=checks.steps_between(
            config.check_every_steps, config.save_every_steps
        ),
        rnkey=jax.random.key(seed),
        accumulate=config.accumulate,
        ema=config.ema,
        precision=config.precision,
        on_nan=config.on_nan,
        steps_per_dispatch=_steps_per_dispatch(config),
        grads=False,
        stop_flag=stop_flag,
        stdout=True,
    )


def _step_trace(
    run: runs.Run, stop_flag: StopFlag, stack: contextlib.ExitStack
) -> profiler.StepTrace | None:
    """What records the steps that were chosen."""
    text = run.config.profile_steps
    if text is None:
        return None
    first, colon, count = text.partition(":")
    if not (colon and first.isdigit() and count.isdigit() and int(first) and int(count)):
        raise UsageError(f"--profile_steps must be FIRST:COUNT, such as 100:5, got {text!r}.")
    trace = profiler.StepTrace(
        run.model_dir / "profile",
        first_step=int(first),
        n_steps=int(count),
        stop_flag=stop_flag,
    )
    return stack.enter_context(contextlib.closing(trace))


def _unless_stopping(
    validation: Callable[[Checkpoint], Summary] | None, run: runs.Run, stop_flag: StopFlag
) -> base.Stage | None:
    """Leaves a validation out that no undisturbed run would make."""
    if validation is None:
        return None
    every = run.config.check_every_steps

    def process(checkpoint: Checkpoint) -> Checkpoint:
        is_between = checkpoint.step % every != 0
        return checkpoint if is_between and stop_flag.is_set() else validation(checkpoint)

    return process


def _stages(
    run: runs.Run,
    validation: base.Stage | None,
    loop: train.TrainLoop,
    stack: contextlib.ExitStack,
) -> Iterator[base.Stage]:
    """What happens at every check; each thing is closed when training ends."""
    config = run.config
    if validation is not None:
        yield validation
    if config.progress:
        yield stack.enter_context(contextlib.closing(progress.ProgressBar(loop.n_steps)))
    writer = tensorboard.SummaryWriter(run.model_dir / "train", params=True)
    yield stack.enter_context(contextlib.closing(writer))


def _saver(run: runs.Run, stack: contextlib.ExitStack) -> base.Stage:
    """What keeps copies for good, if any are wanted."""
    if run.config.save_every_steps is None:
        return base.serial()
    saver = _writer(run, run.model_dir / "save", keep=KEEP_ALL)
    return stack.enter_context(contextlib.closing(saver))


def _writer(run: runs.Run, directory: pathlib.Path, *, keep: int) -> files.CheckpointFileWriter:
    layout = "t5x" if run.config.checkpoint_format == "t5x" else "tekoa"
    return files.CheckpointFileWriter(directory, keep=keep, layout=layout)


def _conclude(
    run: runs.Run,
    validation: Callable[[Checkpoint], Summary] | None,
    last: Checkpoint | None,
    loop: Any,
) -> None:
    """Ends in a result to look at."""
    if last is None:
        print(f"Nothing is left to train: {loop.step} steps are done.")
    if validation is not None:
        summary = last if isinstance(last, Summary) else validation(loop.checkpoint())
        found = {
            name.removeprefix("valid_"): value
            for name, value in summary.metrics["train"].items()
            if name.startswith("valid_")
        }
        show_metrics(run.config, loop.step, found)
    print(f"Checkpoints and TensorBoard files are in {run.model_dir}.")


def show_metrics(config: RunConfig, step: int, found: dict[str, float]) -> None:
    """Prints metrics for people, or as one line of JSON."""
    if config.json:
        print(json.dumps({"step": step, **found}), flush=True)
        return
    for name, value in found.items():
        print(f"{name} at step {step}: {value:.6g}", flush=True)


def _n_steps(config: RunConfig, batches: Any) -> int | None:
    # With a step taken from elsewhere batches are not counted from step 0: their end tells.
    n_batches = None if config.train_load_step else batches.n_batches
    ends = [n for n in (config.max_train_steps, n_batches) if n is not None]
    return min(ends) if ends else None


def _steps_per_dispatch(config: RunConfig) -> Any:
    text = config.steps_per_dispatch
    if text != "auto" and not (text.isdigit() and int(text)):
        raise UsageError(f"--steps_per_dispatch must be 'auto' or a number, got {text!r}.")
    return text if text == "auto" else int(text)
