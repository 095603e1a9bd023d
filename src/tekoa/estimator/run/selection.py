"""What training does with validation metrics: keeps the best checkpoints and stops early."""

import contextlib
import re
from collections.abc import Iterator

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run.run import Run
from tekoa.extensions import best_files, early_stop, serial
from tekoa.loop.checkpoint import Checkpoint, as_summary
from tekoa.loop.train import TrainLoop

_GROUP = "train"
_PREFIX = "valid_"
# Metrics that are better if they are lower, whatever stands before these words.
_LOW = re.compile("(loss|error|perplexity|rmse|mse|mae)$")


def best_stages(run: Run, stack: contextlib.ExitStack) -> Iterator[serial.Stage]:
    """Yields the writers of `--save_high` and `--save_low`; they are closed with the stack."""
    config = run.config
    modes: tuple[tuple[str, best_files.Mode], ...] = (("save_high", "max"), ("save_low", "min"))
    for flag, mode in modes:
        for name in getattr(config, flag):
            metric = _full_name(name)
            writer = best_files.BestFileWriter(
                run.model_dir, metric, mode=mode, group=_GROUP, keep=config.max_save
            )
            yield _checked(flag, metric, stack.enter_context(contextlib.closing(writer)))


def early_stopping(run: Run, loop: TrainLoop) -> early_stop.EarlyStopping | None:
    """Creates what `--early_stop=METRIC:N` requests, or returns None.

    Raises:
        UsageError: If the flag is malformed.
    """
    text = run.config.early_stop
    if text is None:
        return None
    match = re.fullmatch(r"([^:]+):0*([1-9]\d{0,8})(?::(min|max))?", text)
    if match is None:
        raise UsageError(
            f"--early_stop must be METRIC:N or METRIC:N:max, such as valid_loss:5, got {text!r}."
        )
    metric, n_checks, mode = match.groups()
    if mode is None and not _LOW.search(metric):
        raise UsageError(
            f"--early_stop={text}: say which values of {metric} are better, {text}:min or "
            f"{text}:max."
        )
    stopping = early_stop.EarlyStopping(
        _full_name(metric),
        patience=int(n_checks),
        mode="max" if mode == "max" else "min",
        group=_GROUP,
        stop=loop.stop,
        path=run.model_dir / "early_stop.json",
    )
    stopping.resume(loop.step)
    return stopping


def stop_stage(stopping: early_stop.EarlyStopping, metric_flag: str) -> serial.Stage:
    """Returns the stage of `early_stopping`, which checks that the metric exists."""
    return _checked("early_stop", _full_name(metric_flag.partition(":")[0]), stopping)


def _full_name(name: str) -> str:
    return name if name.startswith(_PREFIX) else f"{_PREFIX}{name}"


def _checked(flag: str, metric: str, stage: serial.Stage) -> serial.Stage:
    """Wraps a stage: a metric that does not exist is a mistake in the flag."""

    def run(checkpoint: Checkpoint) -> Checkpoint:
        metrics = as_summary(checkpoint).metrics[_GROUP]
        if metric not in metrics:
            names = ", ".join(name for name in metrics if name.startswith(_PREFIX)) or "none"
            raise UsageError(f"--{flag} names an unknown metric: {metric}. Available: {names}.")
        return stage(checkpoint)

    return run
