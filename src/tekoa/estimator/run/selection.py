"""What training does with validation metrics: keeps the best checkpoints and stops early."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping

from tekoa.estimator.cli import valid_sets
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
    modes: tuple[tuple[str, best_files.Mode], ...] = (("save_high", "max"), ("save_low", "min"))
    for flag, mode in modes:
        for name in getattr(run.config, flag):
            metric = _full_name(name)
            yield _checked(run, flag, metric, _best_writer(run, metric, mode, stack))


def _best_writer(
    run: Run, metric: str, mode: best_files.Mode, stack: contextlib.ExitStack
) -> serial.Stage:
    """Returns a writer of the best checkpoints, opened by the first one that has the metric."""

    @functools.cache
    def writer() -> best_files.BestFileWriter:
        writer = best_files.BestFileWriter(
            run.model_dir, metric, mode=mode, group=_GROUP, keep=run.config.max_save
        )
        return stack.enter_context(contextlib.closing(writer))

    def process(checkpoint: Checkpoint) -> Checkpoint:
        return writer()(checkpoint)

    return process


def stoppings(run: Run, loop: TrainLoop) -> dict[str, early_stop.Stopping]:
    """Creates what `--early_stop` and `--stop_when` request, by flag, at the step of the loop.

    Raises:
        UsageError: If a flag is malformed.
    """
    stoppings: dict[str, early_stop.Stopping] = {}
    if run.config.early_stop is not None:
        stoppings["early_stop"] = _early_stopping(run, loop, run.config.early_stop)
    if run.config.stop_when is not None:
        stoppings["stop_when"] = _stop_when(run, loop, run.config.stop_when)
    for stopping in stoppings.values():
        stopping.resume(loop.step)
    return stoppings


def _early_stopping(run: Run, loop: TrainLoop, text: str) -> early_stop.EarlyStopping:
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
    return early_stop.EarlyStopping(
        _full_name(metric),
        patience=int(n_checks),
        mode="max" if mode == "max" else "min",
        group=_GROUP,
        stop=loop.stop,
        path=run.model_dir / "early_stop.json",
    )


def _stop_when(run: Run, loop: TrainLoop, text: str) -> early_stop.StopWhen:
    try:
        metric, comparison, bound = early_stop.parse_condition(text)
    except ValueError as error:
        raise UsageError(f"--stop_when: {error}") from None
    return early_stop.StopWhen(
        f"{_full_name(metric)}{comparison}{bound!r}",
        group=_GROUP,
        stop=loop.stop,
        path=run.model_dir / "stop_when.json",
    )


def stop_stages(run: Run, stoppings: Mapping[str, early_stop.Stopping]) -> Iterator[serial.Stage]:
    """Yields the stages of `stoppings`, which check that their metrics exist."""
    for flag, stopping in stoppings.items():
        yield _checked(run, flag, stopping.metric, stopping)


def _full_name(name: str) -> str:
    return name if name.startswith(_PREFIX) else f"{_PREFIX}{name}"


def _checked(run: Run, flag: str, metric: str, stage: serial.Stage) -> serial.Stage:
    """Wraps a stage: a metric that does not exist is a mistake in the flag.

    The stage is skipped at checks without a validation on the set that the metric is of.
    """
    prefixes = [valid_sets.prefix(name) for name in valid_sets.parse_sets(run.config.valid_sets)]
    own = tuple(prefix for prefix in prefixes if metric.startswith(prefix))

    def process(checkpoint: Checkpoint) -> Checkpoint:
        metrics = as_summary(checkpoint).metrics[_GROUP]
        if metric not in metrics:
            if any(not any(name.startswith(prefix) for name in metrics) for prefix in own):
                return checkpoint
            names = ", ".join(name for name in metrics if name.startswith(_PREFIX)) or "none"
            raise UsageError(f"--{flag} names an unknown metric: {metric}. Available: {names}.")
        return stage(checkpoint)

    return process
