"""`fit`: trains a model in one call, with the loop and the extensions that users can also call.

It converts the data (`fitting/data`), decides what happens at every checkpoint (`checks.py`),
creates a `TrainLoop`, trains it (`run.py`) and returns a `FitResult` (`result.py`).
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from tekoa.core import nonfinite, objective
from tekoa.core.loss.reduction import Reduction
from tekoa.core.model import Remat
from tekoa.data.batching.schedule import Numbers, Schedule
from tekoa.extensions import serial
from tekoa.extensions.trackers.tracker import Tracker
from tekoa.fitting import explain, loss_names, metric_names
from tekoa.fitting.checks import Checks
from tekoa.fitting.data.dataset import Dataset, Names
from tekoa.fitting.data.sets import as_datasets
from tekoa.fitting.result import FitResult
from tekoa.fitting.run import open_run
from tekoa.fitting.settings import settings_of
from tekoa.loop.task import TrainTask, check_count
from tekoa.loop.train import TrainLoop
from tekoa.sharding.layout import Layout

# Checks per run if neither epochs nor steps_per_check say how many.
_N_CHECKS = 20


@explain.explain_arguments
def fit(
    model: Any,
    data: Any,
    *,
    # What is trained, and for how long.
    loss: str | Callable[..., Any] | None = None,
    optimizer: Any = "auto",
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    apply: Callable[..., Any] | None = None,
    trainable: Any = None,
    unfreeze_at: Mapping[str, int] | None = None,
    freeze_at: Mapping[str, int] | None = None,
    # The data.
    batch_size: Numbers = 32,
    inputs: Names | None = None,
    targets: Names | None = None,
    shuffle: bool = True,
    # Validation, and what follows from it.
    validation: Any = None,
    metrics: Sequence[str] | Mapping[str, Callable[..., Any]] | str = (),
    validate_every: int | Mapping[str, int] = 1,
    best: str | tuple[str, metric_names.Mode] | None = None,
    patience: int | None = None,
    stop_when: str | None = None,
    # Files, logs and the screen.
    directory: str | os.PathLike[str] | None = None,
    steps_per_check: int | None = None,
    callbacks: serial.Stage | Sequence[serial.Stage] = (),
    track: str | Tracker | Sequence[str | Tracker] = (),
    log_norms: bool = False,
    show_progress: bool = True,
    # How a step is computed.
    accumulate: int = 1,
    reduction: Reduction = "auto",
    precision: objective.Precision = "float32",
    ema: float | None = None,
    clip_norm: float | None = None,
    grad_noise: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    on_nan: nonfinite.OnNan = "stop",
    remat: Remat | None = None,
    layout: Layout | None = None,
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
        steps: Number of optimizer steps, for which the data is repeated; or pass epochs.
        epochs: Number of passes over the data; 1 if neither is set and the data has an end.
        seed: Seed of all randomness: order of the data, dropout, initial parameters.
        apply: The function that runs the model, if `model` does not include it.
        trainable: Which parameters to train, as for `TrainTask`: a pattern searched in their names,
            a table of patterns, or for NNX a filter such as `nnx.LoRA`; None for all.
        unfreeze_at: Which parameters begin to train later, as for `TrainTask`: pattern to the
            number of steps before.
        freeze_at: Which parameters train no longer after a number of steps, likewise.
        batch_size: Rows per batch; or by the number of steps after which they change:
            {0: 32, 1000: 64}. Evaluation uses the first number.
        inputs: Names of the fields that the model receives, if the data has named fields.
        targets: Names of the fields that the loss and the metrics receive.
        shuffle: Whether to shuffle the examples of every epoch.
        validation: Data in any of these forms; a fraction of the data to hold out; or several data
            sets by name, {"clean": ..., "noisy": ...}, whose metrics are "eval/clean/loss" and so
            on.
        metrics: Names of metrics ("accuracy", "top5", "f1", "precision", "recall", "auc",
            "perplexity", "mse", "rmse", "mae", "r2", ...), or functions by name, measured on the
            validation data.
        validate_every: Validate at every n-th check and at the last one; a number, or numbers by
            the name of the data set.
        best: The validation metric by which the best checkpoint is kept in `directory`: a name, or
            a pair such as ("my_score", "max"). "loss" by default if there is validation data. Of
            several data sets, name the one: "clean/loss"; the default is the first.
        patience: Stop after this many validations in a row without a better value of `best`.
        stop_when: Stop once a validation metric reaches a value: "accuracy>=0.99", or with several
            data sets "clean/accuracy>=0.99".
        directory: Where checkpoints, metrics and TensorBoard files are written: a path, or a URL
            in an object store. Called again with the same directory, `fit` resumes.
        steps_per_check: Steps between checkpoints; by default an epoch, or a twentieth of `steps`.
        callbacks: Functions, or one, that receive every checkpoint and return it.
        track: Where metrics are sent besides: "wandb", "mlflow", "csv", a `Tracker`, or several.
        log_norms: Whether to log the norms of every parameter, its gradient and its update.
        show_progress: Whether to show a progress bar and one line per validation.
        accumulate: As for `make_train_step`.
        reduction: As for `make_train_step`.
        precision: As for `make_train_step`.
        ema: Decay of a moving average of the parameters, which evaluation then uses.
        clip_norm: As for `make_train_step`.
        grad_noise: As for `make_train_step`.
        label_smoothing: The part of each label that training with "cross_entropy" spreads over all
            classes. The loss that is reported, also in training, is the plain one.
        z_loss: Weight of the squared log-normalizer in training with "cross_entropy".
        on_nan: As for `TrainLoop`.
        remat: As for `make_train_step`.
        layout: As for `TrainLoop`.

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
    callback = serial.serial(*([callbacks] if callable(callbacks) else callbacks))
    train, sets = as_datasets(data, validation, inputs=inputs, targets=targets, seed=seed)
    batches, n_steps, every = _plan(
        train, steps, epochs, batch_size, seed, shuffle, steps_per_check
    )
    checks = Checks.of(
        loss_names.find_loss(loss, label_smoothing=label_smoothing, z_loss=z_loss),
        metrics,
        sets,
        batch_size=Schedule.of("batch_size", batch_size).at(0),
        validate_every=validate_every,
        best=best,
        patience=patience,
        stop_when=stop_when,
        directory=directory,
    )
    task = TrainTask(
        optimizer=optimizer,
        loss=checks.loss,
        data=batches,
        apply=apply,
        unfreeze_at=unfreeze_at,
        freeze_at=freeze_at,
        split=train.split,
        reduction=reduction,
        trainable=trainable,
        remat=remat,
        clip_norm=clip_norm,
        grad_noise=grad_noise,
    )
    how = {"precision": precision, "ema": ema, "clip_norm": clip_norm, "grad_noise": grad_noise}
    settings = settings_of(optimizer, loss=loss, batch_size=batch_size, **how)
    with open_run(directory, track=track, settings=settings, show_progress=show_progress) as run:
        loop = TrainLoop(
            model=run.resumable(model),
            task=task,
            n_steps=n_steps,
            n_steps_per_checkpoint=every,
            rng=jax.random.key(seed),
            accumulate=accumulate,
            ema=ema,
            precision=precision,
            on_nan=on_nan,
            grads="norms" if log_norms else False,
            layout=layout,
            stop_flag=run.stop_flag,
            stdout=show_progress,
        )
        with explain.training_errors(loop, checks.loss, train, sets):
            history = run.train(loop, checks, callback)
    return FitResult(
        loop=loop,
        original=model,
        history=history,
        checks=checks,
        data=train,
        directory=run.directory,
        is_complete=run.is_complete,
    )


def _plan(
    dataset: Dataset,
    steps: int | None,
    epochs: int | None,
    batch_size: Numbers,
    seed: int,
    shuffle: bool,
    steps_per_check: int | None,
) -> tuple[Iterable[Any], int | None, int]:
    """Returns the batches, the number of steps, and the steps between two checks."""
    if steps is not None and epochs is not None:
        raise ValueError(f"Pass steps= or epochs=, not both; got {steps} and {epochs}.")
    if steps is None and epochs is None:
        epochs = 1
    for name, value in (("steps", steps), ("epochs", epochs), ("seed", seed)):
        if value is not None:
            check_count(name, value, 0 if name == "seed" else 1)
    batches, n_batches = dataset.train_batches(
        batch_size=batch_size, epochs=epochs, steps=steps, seed=seed, shuffle=shuffle
    )
    n_steps = n_batches if steps is None else steps
    every = steps_per_check
    if every is None and n_steps is not None:
        every = max(1, -(-n_steps // (epochs if epochs and epochs > 1 else _N_CHECKS)))
    return batches, n_steps, every or 100
