"""The modes of the command, put together from loops, extensions, data and store."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import TextIO

from tekoa.core import hosts
from tekoa.estimator import dry_run, restore, watch
from tekoa.estimator import run as runs
from tekoa.estimator.config import RunConfig, UsageError
from tekoa.estimator.plan import run_plan as run_plan
from tekoa.estimator.program import program_of
from tekoa.estimator.training import run_train as run_train
from tekoa.estimator.training import show_metrics
from tekoa.store import names, signals


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
        if config.pred_pattern is not None:
            raise UsageError("Both --train_pattern and --pred_pattern: say which by --mode.")
        return "train"
    if config.pred_pattern is not None:
        return "predict"
    raise UsageError(
        "Nothing tells what to do: give --train_pattern, --eval_pattern or --pred_pattern, or a "
        "command such as `tekoa train mnist`."
    )


def run_eval_once(config: RunConfig) -> int:
    """Evaluates one checkpoint and prints its metrics; gives the exit code."""
    run = runs.open_run(config)
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
    run = runs.open_run(config)
    if run.config.dry_run:
        return dry_run.evaluate(run, program_of(run, "eval_wait"))
    with signals.stop_flag() as stop_flag:
        watcher = watch.Watcher(run, program_of(run, "eval_wait").evaluation(), stop_flag)
        with contextlib.suppress(InterruptedError):
            watcher.run(lambda step, found: show_metrics(run.config, step, found))
    return signals.EXIT_STOPPED if stop_flag.is_set() else 0


def run_predict(config: RunConfig) -> int:
    """Writes one line per example; gives the exit code."""
    run = runs.open_run(config)
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
    if path is None or not hosts.current().is_writer:
        yield sys.stdout
        return
    part = pathlib.Path(f"{path}.part")
    with part.open("w") as file:
        yield file
    os.replace(part, path)
