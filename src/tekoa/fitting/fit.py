"""`fit`: trains a model in one call, with the loop and the extensions that users can also call."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tekoa import hosts
from tekoa.core import nonfinite, objective
from tekoa.core.model import Remat
from tekoa.extensions import (
    best_files,
    checkpoint_files,
    early_stop,
    metrics_file,
    monitor,
    progress,
    run_record,
    serial,
)
from tekoa.extensions import tensorboard as tensorboard_lib
from tekoa.extensions.trackers.tracker import Tracker
from tekoa.fitting import inputs as data_lib
from tekoa.fitting import loss_names, metric_names
from tekoa.fitting.history import History
from tekoa.fitting.inputs import Dataset
from tekoa.fitting.result import FitResult
from tekoa.hosts import signals
from tekoa.loop.task import TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.sharding.layout import Layout

# Checks per run if neither epochs nor steps_per_check say how many.
_N_CHECKS = 20


def fit(
    model: Any,
    data: Any,
    *,
    loss: str | Callable[..., Any] | None = None,
    optimizer: Any = "auto",
    steps: int | None = None,
    epochs: int | None = None,
    validation: Any = None,
    metrics: Sequence[str] | Mapping[str, Callable[..., Any]] | str = (),
    directory: str | os.PathLike[str] | None = None,
    batch_size: int = 32,
    inputs: data_lib.Names | None = None,
    targets: data_lib.Names | None = None,
    shuffle: bool = True,
    best: str | tuple[str, metric_names.Mode] | None = None,
    patience: int | None = None,
    callbacks: Sequence[serial.Stage] = (),
    track: str | Tracker | Sequence[str | Tracker] = (),
    log_norms: bool = False,
    steps_per_check: int | None = None,
    apply: Callable[..., Any] | None = None,
    ema: float | None = None,
    precision: objective.Precision = "float32",
    accumulate: int = 1,
    on_nan: nonfinite.OnNan = "stop",
    remat: Remat | None = None,
    clip_norm: float | None = None,
    grad_noise: float | None = None,
    layout: Layout | None = None,
    seed: int = 0,
    show_progress: bool = True,
) -> FitResult:
    """Trains a model.

    Everything that `fit` does is done by `TrainLoop` and its extensions, and the result is
    bit-for-bit the same. Ctrl-C and SIGTERM end training with a checkpoint.

    Args:
        model: A Linen, NNX or Equinox module, a Haiku transformed pair, `ModelFns`, or parameters
            with `apply=`: anything that `TrainLoop` accepts.
        data: Inputs and targets `(x, y)` as arrays; an array of inputs; a dict of arrays; a pattern
            such as 'digits://' or 'table.csv'; a DataFrame; a `Source`; a dataset of another
            library; or an iterable of ready batches, which `batch_size` does not change.
        loss: "cross_entropy", "bce", "mse", "mae", "huber", or `loss(outputs, targets)` as for
            `make_train_step`; None if the model returns the loss.
        optimizer: Any optax transformation or the name of one; "auto" finds everything from the
            model, the data and the number of steps.
        steps: Number of optimizer steps; or pass epochs.
        epochs: Number of passes over the data; 1 if neither is set and the data has an end.
        validation: Data in any of these forms, or a fraction of the data to hold out.
        metrics: Names of metrics ("accuracy", "top5", "f1", "precision", "recall", "auc",
            "perplexity", "mse", "rmse", "mae", "r2", ...), or functions by name, measured on the
            validation data.
        directory: Where checkpoints, metrics and TensorBoard files are written. Called again with
            the same directory, `fit` resumes.
        batch_size: Rows per batch.
        inputs: Names of the fields that the model receives, if the data has named fields.
        targets: Names of the fields that the loss and the metrics receive.
        shuffle: Whether to shuffle the examples of every epoch.
        best: The validation metric by which the best checkpoint is kept in `directory`: a name, or
            a pair such as ("my_score", "max"). "loss" by default if there is validation data.
        patience: Stop after this many checks in a row without a better value of `best`.
        callbacks: Functions that receive every checkpoint and return it.
        track: Where metrics are sent besides: "wandb", "mlflow", "csv", a `Tracker`, or several.
        log_norms: Whether to log the norms of every parameter, its gradient and its update.
        steps_per_check: Steps between checkpoints; by default an epoch, or a twentieth of `steps`.
        apply: The function that runs the model, if `model` does not include it.
        ema: Decay of a moving average of the parameters, which evaluation then uses.
        precision: As for `make_train_step`.
        accumulate: As for `make_train_step`.
        on_nan: As for `TrainLoop`.
        remat: As for `make_train_step`.
        clip_norm: As for `make_train_step`.
        grad_noise: As for `make_train_step`.
        layout: As for `TrainLoop`.
        seed: Seed of all randomness: order of the data, dropout, initial parameters.
        show_progress: Whether to show a progress bar and one line per validation.

    Returns:
        The trained model, the history of its metrics, and methods to evaluate and predict.

    Raises:
        ValueError: If arguments contradict one another or a name is unknown.
        TypeError: If the model or the data has no usable form.

    >>> import numpy as np, optax
    >>> from flax import nnx
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> result = fit(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), (x, 3 * x), loss='mse', epochs=50,
    ...              optimizer=optax.adam(0.1), show_progress=False)
    >>> result.predict(np.float32([[0.5]])).round(2)
    array([[1.5]], dtype=float32)
    """
    train_data, valid_data = data_lib.as_datasets(
        data, validation, inputs=inputs, targets=targets, seed=seed
    )
    checks = _Checks.of(loss_names.find_loss(loss), metrics, valid_data, best, patience, directory)
    batches, n_steps, every = _plan(
        train_data, steps, epochs, batch_size, seed, shuffle, steps_per_check
    )
    with signals.stop_flag() as stop_flag, contextlib.ExitStack() as stack:
        trackers = _trackers(track, directory, stack, batch_size=batch_size, optimizer=optimizer)
        # The writer first: a second trainer of the directory is refused at once.
        writer = _writer(directory, stack)
        loop = TrainLoop(
            model=checkpoint_files.CheckpointFileReader(directory, model) if directory else model,
            task=TrainTask(
                optimizer=optimizer,
                loss=checks.loss,
                data=batches,
                apply=apply,
                split=train_data.split,
                remat=remat,
                clip_norm=clip_norm,
                grad_noise=grad_noise,
            ),
            n_steps=n_steps,
            n_steps_per_checkpoint=every,
            rng=jax.random.key(seed),
            accumulate=accumulate,
            ema=ema,
            precision=precision,
            on_nan=on_nan,
            grads="norms" if log_norms else False,
            layout=layout,
            stop_flag=stop_flag,
            stdout=show_progress,
        )
        watch = monitor.Monitor(loop)
        rows, stages = checks.stages(
            loop, directory, batch_size, show_progress, watch, callbacks, stack
        )
        saving = [watch.timed("save", stage) for stage in writer]
        process = serial.serial(*stages, *trackers, *saving)
        is_complete = _run(loop, process, stop_flag, show_progress)
    if directory is not None and is_complete and hosts.current().is_writer:
        run_record.write_end(directory, loop.step)
    return FitResult(
        loop=loop,
        original=model,
        history=History(rows()),
        metrics=checks.metrics,
        data=train_data,
        batch_size=batch_size,
        directory=None if directory is None else pathlib.Path(directory),
        is_complete=is_complete,
        validation=checks.batches(batch_size),
    )


def _run(loop: TrainLoop, process: serial.Stage, stop_flag: Any, show_progress: bool) -> bool:
    """Trains to the end or to a stop; returns whether training is complete."""
    if loop.n_steps is not None and loop.step >= loop.n_steps:
        if show_progress:
            print(f"Nothing to do: all {loop.step} steps are complete.")
        return True
    for checkpoint in loop:
        process(checkpoint)
    if stop_flag.is_set():
        print(f"Stopped at step {loop.step}. Call fit again with the same directory to resume.")
        return False
    return True


def _plan(
    dataset: Dataset,
    steps: int | None,
    epochs: int | None,
    batch_size: int,
    seed: int,
    shuffle: bool,
    steps_per_check: int | None,
) -> tuple[Iterable[Any], int | None, int]:
    """Returns the batches, the number of steps, and the steps between two checks."""
    if steps is not None and epochs is not None:
        raise ValueError(f"Pass steps= or epochs=, not both; got {steps} and {epochs}.")
    if steps is None and epochs is None:
        epochs = 1
    batches, n_batches = dataset.train_batches(
        batch_size=batch_size, epochs=epochs, seed=seed, shuffle=shuffle
    )
    n_steps = n_batches if steps is None else steps
    every = steps_per_check
    if every is None and n_steps is not None:
        every = max(1, -(-n_steps // (epochs if epochs and epochs > 1 else _N_CHECKS)))
    return batches, n_steps, every or 100


def _writer(
    directory: str | os.PathLike[str] | None, stack: contextlib.ExitStack
) -> list[checkpoint_files.CheckpointFileWriter]:
    """Opens the checkpoint writer, if there is a directory."""
    if directory is None:
        return []
    writer = checkpoint_files.CheckpointFileWriter(directory)
    if hosts.current().is_writer:
        run_record.remove_end(directory)
    return [stack.enter_context(contextlib.closing(writer))]


def _trackers(
    track: str | Tracker | Sequence[str | Tracker],
    directory: str | os.PathLike[str] | None,
    stack: contextlib.ExitStack,
    **config: Any,
) -> list[Tracker]:
    """Creates the trackers; they are closed after the writer, when the last step is committed."""
    trackers = [
        item if isinstance(item, Tracker) else Tracker(item, directory, config=config)
        for item in ([track] if isinstance(track, str | Tracker) else track)
    ]
    return [stack.enter_context(contextlib.closing(tracker)) for tracker in trackers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Checks:
    """What happens at every checkpoint."""

    loss: Callable[..., Any] | None
    metrics: dict[str, Callable[..., Any]]
    data: Dataset | None
    best: tuple[str, metric_names.Mode] | None
    patience: int | None

    @classmethod
    def of(
        cls,
        loss: Callable[..., Any] | None,
        metrics: Any,
        data: Dataset | None,
        best: str | tuple[str, metric_names.Mode] | None,
        patience: int | None,
        directory: Any,
    ) -> "_Checks":
        """Checks the arguments of `fit` and fills in their defaults."""
        functions = metric_names.find_metrics(metrics)
        if loss is not None:
            functions = {"loss": _loss_alone(loss), **functions}
        if data is None and (best is not None or patience is not None):
            raise ValueError("best= and patience= need validation data: pass validation=.")
        if best is not None and directory is None:
            raise ValueError("best= keeps the best checkpoint in a directory: pass directory=.")
        if data is not None and best is None and functions:
            best = next(iter(functions))
            best = (best, metric_names.best_mode(best)) if best == "loss" else None
        if isinstance(best, str):
            best = (best, metric_names.best_mode(best))
        if best is not None and best[0] not in functions:
            raise ValueError(f"best={best[0]!r} is not one of the metrics {', '.join(functions)}.")
        return cls(loss=loss, metrics=functions, data=data, best=best, patience=patience)

    def batches(self, batch_size: int) -> Iterable[Any] | None:
        """Returns the validation batches, if there are any."""
        return None if self.data is None else self.data.eval_batches(batch_size)

    def stages(
        self,
        loop: TrainLoop,
        directory: str | os.PathLike[str] | None,
        batch_size: int,
        show_progress: bool,
        watch: monitor.Monitor,
        callbacks: Sequence[serial.Stage],
        stack: contextlib.ExitStack,
    ) -> tuple[Callable[[], list[dict[str, Any]]], list[serial.Stage]]:
        """Returns a function that returns the rows of the history, and the stages."""
        stages: list[Any] = []
        if self.data is not None and self.metrics:
            batches = self.data.eval_batches(batch_size)
            evaluate = loop.evaluation(self.metrics, batches, stop_flag=loop.stop_flag)
            stages.append(watch.timed("validation", evaluate))
        stages.append(watch)
        if show_progress:
            bar = progress.ProgressBar(loop.n_steps, lines=True)
            loop.before_dispatch = bar.advance
            stages.append(stack.enter_context(contextlib.closing(bar)))
        stages += callbacks
        if directory is None:
            rows: list[dict[str, Any]] = []
            return lambda: rows, [*stages, *self._stopping(loop, None), _collect(rows)]
        path = pathlib.Path(directory)
        file = metrics_file.MetricsFile(path / metrics_file.FILE_NAME)
        closing: list[Any] = [file, tensorboard_lib.TensorBoardWriter(path / "train")]
        for writer in closing:
            writer.discard_after(loop.step)
        if self.best is not None and self.metrics:
            metric, mode = self.best
            closing.append(best_files.BestFileWriter(path, metric, mode=mode, stdout=show_progress))
        stages += [stack.enter_context(contextlib.closing(stage)) for stage in closing]
        return lambda: file.rows, [*stages, *self._stopping(loop, path / "early_stop.json")]

    def _stopping(self, loop: TrainLoop, path: pathlib.Path | None) -> Iterator[serial.Stage]:
        if self.patience is not None and self.best is not None:
            metric, mode = self.best
            yield early_stop.EarlyStopping(
                metric, patience=self.patience, mode=mode, stop=loop.stop, path=path
            )


def _collect(rows: list[dict[str, Any]]) -> serial.Stage:
    def collect(checkpoint: Any) -> Any:
        rows.append(metrics_file.row_of(checkpoint))
        return checkpoint

    return collect


def _loss_alone(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss as a metric: without the metrics that it may return beside its value."""

    def value(*args: Any) -> Any:
        result = loss(*args)
        has_metrics = isinstance(result, tuple) and len(result) == 2
        return result[0] if has_metrics and isinstance(result[1], Mapping) else result

    return value
