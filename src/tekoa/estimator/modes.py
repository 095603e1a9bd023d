"""The modes of the command, put together from loops, extensions, data and store."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import jax

from tekoa.core import guard
from tekoa.estimator import dry_run, restore, start, watch
from tekoa.estimator import run as runs
from tekoa.estimator.config import RunConfig, UsageError
from tekoa.estimator.program import Program, program_of
from tekoa.extensions import base, files, progress, tensorboard
from tekoa.loop import feed, train
from tekoa.loop.checkpoint import Checkpoint, Summary
from tekoa.loop.triggers import EverySteps
from tekoa.optim import amos
from tekoa.store import names, signals

KEEP_ALL = 10**9


def choose_mode(config: RunConfig) -> str:
    """Finds the mode from the flags, as the original runner does.

    Raises:
        UsageError: If the flags do not tell.
    """
    if config.mode is not None:
        return config.mode
    if config.eval_pattern is not None:
        if config.pred_pattern is not None:
            raise UsageError("Both --eval_pattern and --pred_pattern: say which by --mode.")
        is_running = config.train_pattern is not None
        if is_running or not names.list_steps(config.model_dir or "."):
            return "eval_wait"
        return "eval_once"
    if config.train_pattern is not None:
        return "train"
    if config.pred_pattern is not None:
        return "predict"
    raise UsageError(
        "Nothing tells what to do: give --train_pattern, --eval_pattern or --pred_pattern, or a "
        "command such as `tekoa train mnist`."
    )


def run_train(config: RunConfig) -> int:
    """Trains a model; gives the exit code."""
    run = _opened_run(config)
    program = program_of(run, "train")
    seed = runs.choose_seed(run)
    config = run.config
    with signals.stop_flag() as stop_flag, contextlib.ExitStack() as stack:
        scales = stack.enter_context(amos.recorded_scales())
        if config.dry_run:
            return dry_run.train(lambda: _train_loop(program, run, seed, stop_flag), program)
        if config.profiler_port is not None:
            jax.profiler.start_server(config.profiler_port)
        loop = _train_loop(program, run, seed, stop_flag)
        validation = program.validation(loop)
        last = None
        keeper = _writer(run, run.model_dir, keep=config.max_ckpt)
        stack.enter_context(contextlib.closing(keeper))
        runs.start_training(run, seed, n_steps=loop.n_steps, scales=scales)
        stages = _stages(run, _unless_stopping(validation, run, stop_flag), loop.n_steps, stack)
        process = base.serial(*stages, keeper)
        if loop.step not in names.list_steps(run.model_dir):
            process(loop.checkpoint())
        # An earlier run may have been told to go further than this one.
        is_left = loop.n_steps is None or loop.step < loop.n_steps
        try:
            for checkpoint in loop if is_left else ():
                last = process(checkpoint)
        except guard.NonFiniteError:
            keeper(loop.checkpoint())
            raise
    if stop_flag.is_set():
        print(f"Stopped at step {loop.step}; the same command goes on from there.")
        return signals.EXIT_STOPPED
    runs.end_training(run, loop.step)
    _conclude(run, validation, last, loop)
    return 0


def _opened_run(config: RunConfig) -> runs.Run:
    run = runs.open_run(config)
    return dry_run.shortened(run) if run.config.dry_run else run


def _train_loop(
    program: Program, run: runs.Run, seed: int, stop_flag: signals.StopFlag
) -> train.TrainLoop:
    config = run.config
    batches = program.train_batches(seed)
    position = feed.position(batches)
    return program.train_loop(
        lambda model, optimizer: start.StartReader(
            run, model, optimizer=optimizer, data_state=position
        ),
        data=batches,
        n_steps=_n_steps(config, batches),
        n_steps_per_checkpoint=config.check_every_steps,
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


def run_eval_once(config: RunConfig) -> int:
    """Evaluates one checkpoint and prints its metrics; gives the exit code."""
    run = _opened_run(config)
    program = program_of(run, "eval_once")
    program.check_data("eval")
    if run.config.dry_run:
        return dry_run.evaluate(run, program)
    path = restore.find_step(run.model_dir, run.config.checkpoint_path)
    with signals.stop_flag() as stop_flag:
        found = program.evaluation()(str(path), stop_flag)
    show_metrics(run.config, names.parse_step(path.name) or 0, found)
    return 0


def run_eval_wait(config: RunConfig) -> int:
    """Evaluates every checkpoint of a training as it comes; gives the exit code."""
    run = _opened_run(config)
    if run.config.dry_run:
        return dry_run.evaluate(run, program_of(run, "eval_wait"))
    with signals.stop_flag() as stop_flag:
        watcher = watch.Watcher(run, program_of(run, "eval_wait").evaluation(), stop_flag)
        with contextlib.suppress(InterruptedError):
            watcher.run(lambda step, found: show_metrics(run.config, step, found))
    return signals.EXIT_STOPPED if stop_flag.is_set() else 0


def run_predict(config: RunConfig) -> int:
    """Writes one line per example; gives the exit code."""
    run = _opened_run(config)
    program = program_of(run, "predict")
    program.check_data("pred")
    if run.config.dry_run:
        return dry_run.predict(run, program)
    path = restore.find_step(run.model_dir, run.config.checkpoint_path)
    with signals.stop_flag() as stop_flag, _opened(run.config.pred_output) as out:
        for result in program.predictions(str(path), stop_flag):
            print(result, file=out)
    return signals.EXIT_STOPPED if stop_flag.is_set() else 0


def run_scales(config: RunConfig) -> int:
    """Prints the table of Amos scales; gives the exit code."""
    print(program_of(runs.open_run(config), "train").scales())
    return 0


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears whole."""
    if path is None:
        yield sys.stdout
        return
    part = pathlib.Path(f"{path}.part")
    with part.open("w") as file:
        yield file
    os.replace(part, path)


def show_metrics(config: RunConfig, step: int, found: dict[str, float]) -> None:
    """Prints metrics for people, or as one line of JSON."""
    if config.json:
        print(json.dumps({"step": step, **found}))
        return
    for name, value in found.items():
        print(f"{name} at step {step}: {value:.6g}")


def _unless_stopping(
    validation: Callable[[Checkpoint], Summary] | None, run: runs.Run, stop_flag: signals.StopFlag
) -> base.Stage | None:
    """Leaves a validation out that no undisturbed run would make: whoever stops us waits."""
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
    n_steps: int | None,
    stack: contextlib.ExitStack,
) -> Iterator[base.Stage]:
    """What happens at every check; each thing is closed when training ends."""
    config = run.config
    if validation is not None:
        yield validation
    if config.progress:
        yield stack.enter_context(contextlib.closing(progress.ProgressBar(n_steps)))
    writer = tensorboard.SummaryWriter(run.model_dir / "train", params=True)
    yield stack.enter_context(contextlib.closing(writer))
    if config.save_every_steps is not None:
        saver = _writer(run, run.model_dir / "save", keep=KEEP_ALL)
        stack.enter_context(contextlib.closing(saver))
        yield base.when(EverySteps(config.save_every_steps), saver)


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


def _n_steps(config: RunConfig, batches: Any) -> int | None:
    # With a step taken from elsewhere batches are not counted from step 0: their end tells.
    n_batches = None if config.train_load_step else batches.n_batches
    ends = [n for n in (config.max_train_steps, n_batches) if n is not None]
    return min(ends) if ends else None


def _steps_per_dispatch(config: RunConfig) -> Any:
    text = config.steps_per_dispatch
    if text != "auto" and not text.isdigit():
        raise UsageError(f"--steps_per_dispatch must be 'auto' or a number, got {text!r}.")
    return text if text == "auto" else int(text)
