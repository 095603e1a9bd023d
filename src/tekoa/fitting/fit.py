"""`fit`: trains a model in one call, with the loop and the extensions that users can also call."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import jax

from tekoa import hosts
from tekoa.core import nonfinite, objective
from tekoa.core.model import Remat
from tekoa.extensions import checkpoint_files, monitor, run_record, serial
from tekoa.extensions.early_stop import Stopping
from tekoa.extensions.trackers.tracker import Tracker
from tekoa.fitting import explain, loss_names, metric_names
from tekoa.fitting import inputs as data_lib
from tekoa.fitting.checks import Checks
from tekoa.fitting.history import History
from tekoa.fitting.inputs import Dataset
from tekoa.fitting.result import FitResult
from tekoa.hosts import signals
from tekoa.loop.task import TrainTask, check_count
from tekoa.loop.train import TrainLoop
from tekoa.sharding.layout import Layout
from tekoa.store.mirror import mirror
from tekoa.store.read import newest

# Checks per run if neither epochs nor steps_per_check say how many.
_N_CHECKS = 20


P = ParamSpec("P")


def _in_any_directory(function: Callable[P, FitResult]) -> Callable[P, FitResult]:
    """Lets `directory` be a URL: the function receives its working copy, published at the end."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> FitResult:
        directory = kwargs.get("directory")
        if not (isinstance(directory, str | os.PathLike) and mirror.is_url(directory)):
            return function(*args, **kwargs)
        with mirror.mirrored(directory) as local_directory:
            kwargs["directory"] = local_directory
            return function(*args, **kwargs)

    return run


@explain.explain_arguments
@_in_any_directory
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
    stop_when: str | None = None,
    validate_every: int | Mapping[str, int] = 1,
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
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
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
        validation: Data in any of these forms; a fraction of the data to hold out; or several data
            sets by name, {"clean": ..., "noisy": ...}, whose metrics are "eval/clean/loss" and so
            on.
        metrics: Names of metrics ("accuracy", "top5", "f1", "precision", "recall", "auc",
            "perplexity", "mse", "rmse", "mae", "r2", ...), or functions by name, measured on the
            validation data.
        directory: Where checkpoints, metrics and TensorBoard files are written: a path, or a URL
            in an object store. Called again with the same directory, `fit` resumes.
        batch_size: Rows per batch.
        inputs: Names of the fields that the model receives, if the data has named fields.
        targets: Names of the fields that the loss and the metrics receive.
        shuffle: Whether to shuffle the examples of every epoch.
        best: The validation metric by which the best checkpoint is kept in `directory`: a name, or
            a pair such as ("my_score", "max"). "loss" by default if there is validation data. Of
            several data sets, name the one: "clean/loss"; the default is the first.
        patience: Stop after this many validations in a row without a better value of `best`.
        stop_when: Stop once a validation metric reaches a value: "accuracy>=0.99", or with several
            data sets "clean/accuracy>=0.99".
        validate_every: Validate at every n-th check and at the last one; a number, or numbers by
            the name of the data set.
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
        label_smoothing: The part of each label that training with "cross_entropy" spreads over all
            classes. The loss that is reported, also in training, is the plain one.
        z_loss: Weight of the squared log-normalizer in training with "cross_entropy".
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
    train, sets = data_lib.as_datasets(data, validation, inputs=inputs, targets=targets, seed=seed)
    checks = Checks.of(
        loss_names.find_loss(loss, label_smoothing=label_smoothing, z_loss=z_loss),
        metrics,
        sets,
        validate_every=validate_every,
        best=best,
        patience=patience,
        stop_when=stop_when,
        directory=directory,
    )
    batches, n_steps, every = _plan(
        train, steps, epochs, batch_size, seed, shuffle, steps_per_check
    )
    with signals.stop_flag() as stop_flag, contextlib.ExitStack() as stack:
        trackers = _trackers(track, directory, stack, batch_size=batch_size, optimizer=optimizer)
        # The writer first: a second trainer of the directory is refused at once.
        writer = _writer(directory, stack)
        loop = TrainLoop(
            model=_resumable(model, directory),
            task=TrainTask(
                optimizer=optimizer,
                loss=checks.loss,
                data=batches,
                apply=apply,
                split=train.split,
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
        stages = (callbacks, trackers, writer)
        with explain.training_errors(loop, checks.loss, train, sets):
            rows, is_complete = _train(loop, checks, stages, directory, batch_size, show_progress)
    if directory is not None and is_complete and hosts.current().is_writer:
        run_record.write_end(directory, loop.step)
    return FitResult(
        loop=loop,
        original=model,
        loss=checks.loss,
        history=History(rows()),
        metrics=checks.metrics,
        data=train,
        batch_size=batch_size,
        directory=None if directory is None else pathlib.Path(directory),
        is_complete=is_complete,
        validation=checks.batches(batch_size),
    )


def _train(
    loop: TrainLoop,
    checks: Checks,
    stages: tuple[Sequence[serial.Stage], ...],
    directory: str | os.PathLike[str] | None,
    batch_size: int,
    show_progress: bool,
) -> tuple[Callable[[], list[dict[str, Any]]], bool]:
    """Trains; returns what returns the rows of the history, and whether training is complete."""
    callbacks, trackers, writers = stages
    if show_progress:
        explain.print_notes(loop, checks.metrics.keys() - {"loss"}, checks.sets)
    watch = monitor.Monitor(loop)
    stoppings = checks.stoppings(loop, directory)
    with contextlib.ExitStack() as stack:
        rows, checking = checks.stages(
            loop, stoppings, directory, batch_size, show_progress, watch, callbacks, stack
        )
        saving = [watch.timed("save", stage) for stage in writers]
        process = serial.serial(*checking, *trackers, *saving)
        is_complete = _run(loop, process, [stage for _, stage in stoppings], show_progress)
    return rows, is_complete


def _run(
    loop: TrainLoop,
    process: serial.Stage,
    stoppings: Sequence[Stopping],
    show_progress: bool,
) -> bool:
    """Trains to the end or to a stop; returns whether training is complete."""
    reasons = [stopping.reason for stopping in stoppings if stopping.should_stop]
    if reasons or (loop.n_steps is not None and loop.step >= loop.n_steps):
        why = "; ".join(reasons) or f"all {loop.step} steps are complete"
        if show_progress:
            print(f"Nothing to do: {why}.")
        return True
    for checkpoint in loop:
        process(checkpoint)
    for stopping in stoppings:
        if stopping.should_stop and show_progress:
            print(f"Stopped early at step {loop.step}: {stopping.reason}.")
    if loop.stop_flag is not None and loop.stop_flag.is_set():
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
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("seed", seed)):
        if value is not None:
            check_count(name, value, 0 if name == "seed" else 1)
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


def _resumable(model: Any, directory: str | os.PathLike[str] | None) -> Any:
    """Returns the model, or a reader around it if there may be a checkpoint to resume from."""
    if directory is None:
        return model
    # A reader traces the initialisation once more. Other processes may see files late.
    is_alone = hosts.current().count == 1
    if is_alone and newest.newest_valid(directory, lambda path: path) is None:
        return model
    return checkpoint_files.CheckpointFileReader(directory, model)


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
