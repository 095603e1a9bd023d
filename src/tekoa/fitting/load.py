"""Trained models for inference."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.bridges import any_model
from tekoa.core import batch as batches
from tekoa.core import objective
from tekoa.core.model import ModelFns
from tekoa.exchange import trained
from tekoa.extensions import best_files
from tekoa.fitting import metric_names
from tekoa.store import errors
from tekoa.store.mirror import mirror


def load(
    directory: str | os.PathLike[str],
    model: Any,
    *,
    best: str | tuple[str, metric_names.Mode] | None = None,
    average: bool = True,
    step: int | None = None,
    apply: Callable[..., Any] | None = None,
) -> Any:
    """Returns a model with the weights of a checkpoint, for inference.

    Args:
        directory: The directory of a run, of its checkpoints, or of a single one.
        model: The model, as passed to `fit` or `TrainLoop`. An NNX or Equinox module is not
            changed; its weights only show the structure.
        best: Load the best checkpoint by this validation metric, as for `fit`: "accuracy",
            ("my_score", "max") or "clean/loss"; by default the newest valid checkpoint.
        average: Whether to use the moving average of the parameters if there is one.
        step: The step to load; the newest valid one by default.
        apply: The function that runs the model, if `model` does not include it.

    Returns:
        An NNX or Equinox module; a bound Linen module, which can be called; for other models, the
        parameters.

    Raises:
        errors.StoreError: If there is no such checkpoint, or it does not fit the model.
    """
    path = pathlib.Path(directory)
    if best is not None:
        metric, mode = best if isinstance(best, tuple) else (best, metric_names.best_mode(best))
        path /= best_files.folder_of(metric, "eval", mode)
        if not mirror.is_url(directory) and not path.exists():
            raise errors.StoreError(
                f"{directory} has no best checkpoint by {metric!r}. `fit` keeps one if it has "
                f"validation data and best={metric!r}; 'loss' is the default."
            )
    fns = any_model.as_model_fns(model, apply)
    weights = _for_model(trained.read(path, step=step, average=average), fns, path)
    variables = objective.merge_carry(weights.variables, weights.carry)
    arrays = jax.tree.map(jnp.asarray, (weights.params, variables))
    return any_model.as_object(model, fns, *arrays)


def _for_model(weights: trained.Trained, fns: ModelFns, path: pathlib.Path) -> trained.Trained:
    """Returns the weights in the structure of the model, which the recorded inputs determine.

    Raises:
        errors.MismatchError: If they do not fit the model.
    """
    # An NNX or Equinox module has its weights already. Checkpoints of earlier versions have no
    # inputs.
    if fns.merge is None and weights.inputs is None:
        return weights
    inputs = () if fns.merge is not None else batches.shapes_from_json(weights.inputs)
    try:
        return trained.for_model(weights, fns, inputs, what=f"{path}: the checkpoint", cast=True)
    except errors.MismatchError:
        raise
    except jax.errors.JAXTypeError:
        return weights  # The model's init needs values, not only shapes.
    except Exception as error:
        raise errors.MismatchError(
            f"{path}: the model cannot be initialised with the inputs of the run, "
            f"{weights.inputs}: {error}"
        ) from error
