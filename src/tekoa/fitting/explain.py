"""What `fit` says about mistakes that are common among users of other libraries."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np

from tekoa.core import batch as batches
from tekoa.core import messages, nonfinite, trees
from tekoa.core.model import run_model
from tekoa.data import ChangedDataError
from tekoa.fitting import loss_names
from tekoa.fitting.data.dataset import Dataset
from tekoa.loop.train import TrainLoop
from tekoa.store.errors import MismatchError

F = TypeVar("F", bound=Callable[..., Any])

# Arguments of Keras, Lightning, Hugging Face and others, and what to write instead.
_OTHER_ARGUMENTS = {
    **dict.fromkeys(("x", "y"), "a pair as the data: fit(model, (x, y), ...)"),
    **dict.fromkeys(("learning_rate", "lr"), "optimizer=optax.adamw(1e-3), or no rate at all"),
    **dict.fromkeys(("validation_data", "val_data", "eval_data"), "validation=(x, y)"),
    "validation_split": "validation=0.1",
    "verbose": "show_progress=False",
    **dict.fromkeys(("max_epochs", "num_epochs", "n_epochs", "num_train_epochs"), "epochs="),
    **dict.fromkeys(("max_steps", "num_steps", "n_steps"), "steps="),
    **dict.fromkeys(("output_dir", "logdir", "model_dir", "workdir"), "directory="),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "clipnorm"), "clip_norm="),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "accumulate="),
}


def explain_arguments(function: F) -> F:
    """Explains arguments that `fit` does not have, and a directory that has another run."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 3:
            raise TypeError("Pass inputs and targets as a pair: fit(model, (x, y), ...).")
        for name in kwargs.keys() - known.keys():
            hint = f" Use {_OTHER_ARGUMENTS[name]}." if name in _OTHER_ARGUMENTS else ""
            hint = hint or messages.did_you_mean(name, known)
            raise TypeError(f"{function.__name__} has no argument {name!r}.{hint}")
        with _resuming_errors(kwargs.get("directory")):
            return function(*args, **kwargs)

    return cast(F, call)


@contextlib.contextmanager
def _resuming_errors(directory: Any) -> Iterator[None]:
    """Adds to an error that the directory contains a run of another model or other data."""
    try:
        yield
    except (MismatchError, ChangedDataError) as error:
        error.add_note(
            f"{os.fspath(directory)} contains an earlier run, which fit would resume. Choose "
            "another directory=, or remove this one to train from scratch."
        )
        raise


@contextlib.contextmanager
def compared_shapes(train: Dataset, other: Dataset, what: str) -> Iterator[None]:
    """Adds to an error that other data has other shapes than the training data.

    Args:
        train: The training data.
        other: The other data.
        what: What the other data is, for the message.
    """
    try:
        yield
    except Exception as error:
        shapes = [data.shapes for data in (train, other)]
        if all(shapes) and shapes[0] != shapes[1]:
            error.add_note(f"{what} has other shapes than the training data: {_text(*shapes)}.")
        raise


def _text(train: dict[str, Any], other: dict[str, Any]) -> str:
    parts = [
        f"{name} {other[name]} instead of {shape}"
        for name, shape in train.items()
        if name in other and other[name] != shape
    ]
    return "; ".join(parts) or f"{sorted(other)} instead of {sorted(train)}"


@contextlib.contextmanager
def training_errors(
    loop: TrainLoop, loss: Any, train: Dataset, validation: Mapping[str, Dataset]
) -> Iterator[None]:
    """Adds to an error of training what is wrong with the data.

    Args:
        loop: The loop; after a NaN or Inf it is back at the bad step.
        loss: The loss.
        train: The training data.
        validation: The validation data by name.
    """
    with contextlib.ExitStack() as stack:
        for name, data in validation.items():
            what = f"The validation data {name}".strip()
            stack.enter_context(compared_shapes(train, data, what))
        try:
            yield
        except nonfinite.NonFiniteError as error:
            is_at_bad_batch = loop.checkpoint().data_state is not None
            if loss_names.is_cross_entropy(loss) and is_at_bad_batch:
                _explain_labels(error, loop, train.split)
            raise


def _explain_labels(error: Exception, loop: TrainLoop, split: Any) -> None:
    """Adds to an error that class numbers are too large for the model, if they are."""
    inputs, (labels, *_) = split(loop.peek_batch())
    state, fns = loop.state, loop.model_fns

    def forward(inputs: Any) -> Any:
        return run_model(fns, state.params, state.variables, inputs, rng=state.rng, train=False)[0]

    n_classes, labels = jax.eval_shape(forward, inputs)[0].shape[-1], np.asarray(labels)
    if labels.dtype.kind in "iu" and labels.max() >= n_classes:
        error.add_note(
            f"The targets contain the class number {labels.max()}, but the model has {n_classes} "
            f"outputs: class numbers must be 0 to {n_classes - 1}."
        )


def print_notes(loop: TrainLoop, metrics: Any, validation: Mapping[str, Dataset]) -> None:
    """Prints what is probably not meant, although it can be trained.

    Args:
        loop: The loop, before training.
        metrics: The metrics that were passed to `fit`.
        validation: The validation data by name.
    """
    if metrics and not validation:
        print("Metrics are measured on validation data: pass validation=, or use evaluate(data).")
    if note := _channels_note(loop):
        print(note)


def _channels_note(loop: TrainLoop) -> str:
    """Returns a line if images seem to have their channels first, which Flax would convolve."""
    inputs = loop.checkpoint().setup.get("inputs") or [None]
    if not isinstance(inputs[0], str):
        return ""
    shape = batches.shapes_from_json(inputs[0]).shape
    names = trees.named_leaves(loop.state.params)
    has_convolution = any(name[-1] == "kernel" and x.ndim == 4 for name, x in names.items())
    if not has_convolution or len(shape) != 4 or shape[1] not in (1, 3) or shape[3] <= 4:
        return ""
    return (
        f"The inputs have shape {shape}: is axis 1 the channels? Convolutions of Flax expect them "
        "last. Use x.transpose(0, 2, 3, 1)."
    )
