"""`tekoa train`: trains a model, with checkpoints, validation, metrics and profiling."""

import collections
import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from tekoa import hosts
from tekoa.core import nonfinite
from tekoa.estimator.cli import output
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.model_file import samples
from tekoa.estimator.model_file.program import Program, TrainParts, program_of
from tekoa.estimator.modes import assemble, dry_run
from tekoa.estimator.run import cadence, check_log, selection, start, tracking
from tekoa.estimator.run import run as runs
from tekoa.extensions import (
    checkpoint_files,
    early_stop,
    metrics_file,
    monitor,
    profiler,
    serial,
    tensorboard,
)
from tekoa.extensions import progress as progress_lib
from tekoa.hosts import signals
from tekoa.hosts.signals import StopFlag
from tekoa.loop import train
from tekoa.loop.checkpoint import Checkpoint, Summary
from tekoa.loop.triggers import EveryChecks
from tekoa.optim.amos import transform
from tekoa.store.commit import paths
from tekoa.store.mirror import mirror
from tekoa.store.store import Store

KEEP_ALL = 10**9


def run_train(config: RunConfig) -> int:
    """Trains a model and returns the exit code."""
    with contextlib.ExitStack() as stack:
        directory = None
        if mirror.is_url(config.model_dir) and not config.dry_run:
            opened = mirror.mirrored(config.model_dir or "", grace_seconds=config.grace_seconds)
            directory = stack.enter_context(opened)
        run = runs.open_run(config, directory)
        return train_run(run, program_of(run, "train"))


def train_run(run: runs.Run, program: Program) -> int:
    """Trains the program of a run and returns the exit code."""
    samples.check_flags(run.config)
    with signals.stop_flag() as stop_flag:
        if run.config.dry_run:
            seed = runs.choose_seed(run)
            return dry_run.train(program, lambda: _train_loop(run, program, seed, stop_flag))
        # Of the earlier ones, each has a state of its own.
        progress = collections.deque(training(run, program, stop_flag), maxlen=1).pop()
    loop = progress.loop
    if stop_flag.is_set():
        print(f"Stopped at step {loop.step}. Run the same command again to resume.")
        return signals.EXIT_STOPPED
    for stopping in progress.stoppings.values():
        if stopping.should_stop:
            print(f"Early stopping at step {loop.step}: {stopping.reason}.")
    _print_result(run, progress)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the training of a run stands.

    Attributes:
        loop: The loop.
        last: The last checkpoint that was processed; None if there was none.
        validation: Validates a checkpoint; None if there is no data for it.
        stoppings: What ends training early, by flag.
    """

    loop: train.TrainLoop
    last: Checkpoint | None
    validation: Callable[[Checkpoint], Summary] | None
    stoppings: Mapping[str, early_stop.Stopping]


def training(
    run: runs.Run, program: Program, stop_flag: StopFlag, *, stdout: bool = True
) -> Iterator[Progress]:
    """Trains a run: yields before the first step, after each check, and at the end.

    Args:
        run: The run; no dry run.
        program: Its model file.
        stop_flag: Ends training with a checkpoint once it is set.
        stdout: Whether the loop prints its messages.
    """
    with runs.remove_new_dir_on_error(run):
        seed = runs.choose_seed(run)
        with contextlib.ExitStack() as stack:
            # Closed after the writer of checkpoints: the last step is tracked once it is committed.
            trackers = tracking.trackers(run, stack)
            # First of all: a second trainer is refused before the model is made or data is read.
            keeper = _writer(run, "", run.config.max_ckpt, stack)
            trace = _step_trace(run, stack)
            parts, loop = _train_loop(run, program, seed, stop_flag, keeper.store, stdout=stdout)
            loop.before_dispatch = _before_dispatch(keeper, trace)
            validation = program.validation(parts, loop, stop_flag)
            _check_validation(run.config, validation)
            sampling = samples.sample_stage(run.config, program, loop)
            stoppings = selection.stoppings(run, loop)
            _record_start(run, seed, parts, loop)
            keeper.meta["code"] = runs.code_digests(run)
            watch = monitor.Monitor(loop, peak_flops=run.config.peak_flops)
            progress = Progress(loop=loop, last=None, validation=validation, stoppings=stoppings)
            stages = [*_stages(run, progress, stop_flag, watch, stack), *trackers]
            if sampling is not None:
                stages.insert(0, watch.timed("samples", sampling))
            yield progress
            for last in _checked(run, progress, stages, keeper, watch, stack):
                progress = dataclasses.replace(progress, last=last)
                yield progress
            if progress.last is None and not stop_flag.is_set():
                for tracker in trackers:
                    tracker.send_missing(loop.step)
        if not stop_flag.is_set():
            runs.end_training(run, loop.step)
        yield progress


def _checked(
    run: runs.Run,
    progress: Progress,
    stages: list[serial.Stage],
    keeper: checkpoint_files.CheckpointFileWriter,
    watch: monitor.Monitor,
    stack: contextlib.ExitStack,
) -> Iterator[Checkpoint]:
    """Trains, and yields the checkpoints once they are processed."""
    config, loop = run.config, progress.loop
    try:
        first = _begin(run, loop, stages, keeper)
        if first is not None:
            yield first
        # The directory may already contain more steps than are requested.
        is_incomplete = loop.n_steps is None or loop.step < loop.n_steps
        if any(stopping.should_stop for stopping in progress.stoppings.values()):
            is_incomplete = False
        save_every = config.save_every_steps
        save = _writer(run, "save", KEEP_ALL, stack) if save_every else serial.serial()
        checkpoints = cadence.checks(
            loop, check_every=config.check_every_steps, save_every=save_every, save=save
        )
        for checkpoint in checkpoints if is_incomplete else ():
            yield checkpoint_files.process(checkpoint, stages, [watch.timed("save", keeper)])
    except nonfinite.NonFiniteError:
        keeper(loop.checkpoint())
        raise
    except InterruptedError:
        pass  # A validation was interrupted.


def _record_start(run: runs.Run, seed: int, parts: TrainParts, loop: train.TrainLoop) -> None:
    """Adds this start to `run.json`, and prints what has changed since the last one."""
    changes = runs.start_training(
        run,
        seed,
        step=loop.step,
        n_steps=loop.n_steps,
        scales=transform.scales_of(parts.optimizer, loop.state.params),
        optimizer=loop.facts.get("optimizer"),
        classes=parts.classes,
    )
    if changes:
        lines = "\n  ".join(changes)
        print(f"Changed at step {loop.step}, since the last start:\n  {lines}", flush=True)


def _check_validation(config: RunConfig, validation: serial.Stage | None) -> None:
    names = [n for n in ("save_high", "save_low", "early_stop", "stop_when") if getattr(config, n)]
    if names and validation is None:
        flags = ", ".join(f"--{name}" for name in names)
        raise UsageError(f"{flags} needs validation data: set --valid_pattern=PATTERN.")


def _begin(
    run: runs.Run,
    loop: train.TrainLoop,
    stages: list[serial.Stage],
    keeper: checkpoint_files.CheckpointFileWriter,
) -> Checkpoint | None:
    """Saves the first state unless it is on disk, or repeats an interrupted validation."""
    checkpoint = loop.checkpoint()
    is_saved = loop.step in paths.list_steps(run.model_dir)
    if not hosts.current().broadcast("is the first checkpoint there", is_saved):
        return serial.serial(*stages, keeper)(checkpoint)
    owed = checkpoint_files.owed(run.model_dir, checkpoint)
    return owed and serial.serial(*stages)(owed)


def _train_loop(
    run: runs.Run,
    program: Program,
    seed: int,
    stop_flag: StopFlag,
    checkpoint_store: Store | None = None,
    *,
    stdout: bool = True,
) -> tuple[TrainParts, train.TrainLoop]:
    """Builds the loop, which starts from what the flags request."""

    def make_reader(parts: TrainParts, data_state: Any) -> start.StartReader:
        # The data has been found by now. Compiling takes seconds.
        if run.config.progress and hosts.current().is_writer and not run.config.dry_run:
            text = f"Training {run.module.__name__} in {mirror.shown(run.model_dir)}. Compiling..."
            print(text, file=sys.stderr, flush=True)
        return start.StartReader(
            run,
            parts.model,
            optimizer=parts.optimizer,
            data_state=data_state,
            checkpoint_store=checkpoint_store,
        )

    if run.config.profiler_port is not None and not run.config.dry_run:
        jax.profiler.start_server(run.config.profiler_port)
    parts, loop = assemble.training_loop(
        run, program, seed, make_reader=make_reader, stop_flag=stop_flag, stdout=stdout
    )
    if (note := _end_note(run.config, loop.n_steps)) and not run.config.dry_run:
        print(note, file=sys.stderr, flush=True)
    return parts, loop


def _end_note(config: RunConfig, n_steps: int | None) -> str:
    """Returns a line if training ends never, or before the step that the command line names."""
    if n_steps is None:
        return (
            "No end is set: training continues until it is stopped (Ctrl-C saves). Set "
            "--max_train_steps or --train_epochs."
        )
    end, is_default = config.max_train_steps, "train_epochs" not in config.set_flags
    if end is None or end <= n_steps or config.train_epochs is None or not is_default:
        return ""
    return (
        f"Training ends at step {n_steps}, before --max_train_steps={end}: the default of the "
        f"model is --train_epochs={config.train_epochs}. Set both for more."
    )


def _step_trace(run: runs.Run, stack: contextlib.ExitStack) -> profiler.StepTrace | None:
    """Returns the hook that profiles --profile_steps, or None if the flag is not set."""
    text = run.config.profile_steps
    if text is None:
        return None
    match = re.fullmatch(r"0*([1-9]\d*):0*([1-9]\d*)", text)
    if match is None:
        raise UsageError(f"--profile_steps must be FIRST:COUNT, such as 100:5, got {text!r}.")
    first, n_steps = map(int, match.groups())
    trace = profiler.StepTrace(runs.subdirectory(run, "profile"), first_step=first, n_steps=n_steps)
    return stack.enter_context(contextlib.closing(trace))


def _before_dispatch(
    keeper: checkpoint_files.CheckpointFileWriter, trace: profiler.StepTrace | None
) -> Callable[[int], None]:
    """Returns the hook that raises if saves failed, and profiles the requested steps."""
    # Several processes must stop at the same step: they see a failure at the next save.
    is_alone = hosts.current().count == 1

    def before_dispatch(step: int) -> None:
        if is_alone:
            keeper.poll()
        if trace is not None:
            trace(step)

    return before_dispatch


def _stages(
    run: runs.Run,
    progress: Progress,
    stop_flag: StopFlag,
    watch: monitor.Monitor,
    stack: contextlib.ExitStack,
) -> Iterator[serial.Stage]:
    """Yields the stages that process every checkpoint; they are closed when training ends."""
    every, loop = run.config.check_every_steps, progress.loop
    if progress.validation is not None:
        on_validation = [
            *selection.best_stages(run, stack),
            *selection.stop_stages(run, progress.stoppings),
        ]
        validate = watch.timed("validation", serial.serial(progress.validation, *on_validation))
        yield serial.when(EveryChecks(1, every, loop.n_steps, stop_flag), validate)
    yield watch
    if run.config.progress:
        bar = progress_lib.ProgressBar(loop.n_steps, lines=True)
        before_dispatch = loop.before_dispatch

        def advance(step: int) -> None:
            if before_dispatch is not None:
                before_dispatch(step)
            bar.advance(step)

        loop.before_dispatch = advance
        yield stack.enter_context(contextlib.closing(bar))
    if run.config.json:
        yield check_log.print_check_as_json
    points = tensorboard.SummaryWriter(runs.subdirectory(run, "train"), params=True)
    lines = metrics_file.MetricsFile(run.model_dir / metrics_file.FILE_NAME)
    for writer in (points, lines):
        # What an earlier start wrote after this step belongs to a history that is not continued.
        writer.discard_after(loop.step)
        yield stack.enter_context(contextlib.closing(writer))


def _writer(
    run: runs.Run, subdirectory: str, keep: int, stack: contextlib.ExitStack
) -> checkpoint_files.CheckpointFileWriter:
    writer = checkpoint_files.CheckpointFileWriter(
        runs.subdirectory(run, subdirectory),
        keep=keep,
        format=run.config.checkpoint_format,
        grace_seconds=run.config.grace_seconds,
        on_slow_save=run.config.on_slow_save,
        run_file=False,  # `start_training` records more.
    )
    return stack.enter_context(contextlib.closing(writer))


def _print_result(run: runs.Run, progress: Progress) -> None:
    """Prints the final metrics and the directory of the run."""
    loop, last, validation = progress.loop, progress.last, progress.validation
    if last is None:
        is_stopped = loop.n_steps is None or loop.step < loop.n_steps
        how = f"training stopped at step {loop.step}" if is_stopped else None
        print(f"Nothing to do: {how or f'all {loop.step} steps are complete'}.")
    if validation is not None:
        summary = last if isinstance(last, Summary) else validation(loop.checkpoint())
        metrics = summary.metrics.get("train", {}).items()
        validated = {name: value for name, value in metrics if name.startswith("valid_")}
        if not run.config.json or last is None:  # Every check was printed.
            print_metrics(run.config, loop.step, validated)
    print(f"Checkpoints and TensorBoard files are in {mirror.shown(run.model_dir)}.")


def print_metrics(config: RunConfig, step: int, metrics: Mapping[str, float]) -> None:
    """Prints one metric per line, or all of them as one line of JSON."""
    if config.json:
        output.print_json({"step": step, **metrics})
        return
    for name, value in metrics.items():
        print(f"{name} at step {step}: {value:.6g}", flush=True)
