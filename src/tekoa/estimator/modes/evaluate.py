"""The commands that evaluate, predict and print scales."""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Literal, TextIO

from tekoa import hosts
from tekoa.core import files
from tekoa.estimator.cli.flags import RunConfig
from tekoa.estimator.model_file.program import Program, program_of
from tekoa.estimator.modes import basin, dry_run, watch
from tekoa.estimator.modes.train import print_metrics
from tekoa.estimator.run import eval_state, run_files
from tekoa.estimator.run import run as runs
from tekoa.hosts import signals
from tekoa.store.commit import paths
from tekoa.store.mirror import mirror


def run_eval_once(config: RunConfig) -> int:
    """Evaluates one checkpoint, prints its metrics and returns the exit code."""
    run, program, step_dir = _open(config, "eval_once", "eval")
    if step_dir is None:
        return dry_run.evaluate(run, program)
    with signals.stop_flag() as stop_flag:
        metrics = program.evaluation()(str(step_dir), stop_flag)
    print_metrics(run.config, paths.parse_step(step_dir.name) or 0, metrics)
    return 0


def run_eval_wait(config: RunConfig) -> int:
    """Evaluates each checkpoint of a run as it is written, and returns the exit code."""
    watch.check_label(config.eval_label)
    run = _with_eval_data(runs.open_run(config, as_trained=True))
    program = program_of(run, "eval_wait")
    if run.config.dry_run:
        return dry_run.evaluate(run, program)
    with signals.stop_flag() as stop_flag, contextlib.ExitStack() as stack:
        eval_dir = None
        if mirror.is_url(config.model_dir):
            # The trainer writes to the run; the results are a directory of their own in it.
            url = f"{str(config.model_dir).rstrip('/')}/{config.eval_label}"
            opened = mirror.mirrored(url, grace_seconds=config.grace_seconds)
            eval_dir = stack.enter_context(opened)
        watcher = watch.Watcher(run, program.evaluation(), stop_flag, eval_dir=eval_dir)
        with contextlib.suppress(InterruptedError):
            watcher.run(lambda step, metrics: print_metrics(run.config, step, metrics))
    return signals.EXIT_STOPPED if stop_flag.is_set() else 0


def run_predict(config: RunConfig) -> int:
    """Writes one prediction per line and returns the exit code."""
    run, program, step_dir = _open(config, "predict", "pred")
    if step_dir is None:
        return dry_run.predict(run, program)
    with signals.stop_flag() as stop_flag, _open_output(run.config.pred_output) as out:
        for result in program.predictions(str(step_dir), stop_flag):
            print(result, file=out)
        if stop_flag.is_set():
            raise InterruptedError("Stopped before the end of the data. Run it again.")
    return 0


def run_scales(config: RunConfig) -> int:
    """Prints the table of Amos scales, or checks them, and returns the exit code."""
    if config.check:
        return basin.run_check(config)
    print(program_of(runs.open_run(config), "train").scales())
    return 0


def _open(
    config: RunConfig, mode: Literal["eval_once", "predict"], kind: Literal["eval", "pred"]
) -> tuple[runs.Run, Program, pathlib.Path | None]:
    """Returns the run, its program and the checkpoint to use (None in a dry run)."""
    run = runs.open_run(config, as_trained=True)
    if kind == "eval":
        run = _with_eval_data(run)
    program = program_of(run, mode)
    program.check_data(kind)
    if run.config.dry_run:
        return run, program, None
    return run, program, eval_state.find_step(run.model_dir, run.config.checkpoint_path)


def _with_eval_data(run: runs.Run) -> runs.Run:
    """Uses the data that training was validated on, if `--eval_pattern` is not set."""
    trained = run_files.read_facts(run.model_dir).get("flags", {})
    pattern = trained.get("eval_pattern") or trained.get("valid_pattern")
    if "eval_pattern" in run.config.set_flags or pattern in (None, run.config.eval_pattern):
        return run
    print(f"Evaluating on {pattern}, as in training.", file=sys.stderr, flush=True)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, eval_pattern=pattern))


@contextlib.contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    """Opens standard output, or a file that gets its name only when it is complete."""
    if path is None or not hosts.current().is_writer:
        yield sys.stdout
        return
    part = files.local_path(f"{path}.part")
    with part.open("w") as file:
        yield file
    os.replace(part, files.local_path(path))
