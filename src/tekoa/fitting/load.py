"""Trained models for inference."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.bridges import any_model
from tekoa.core import trees
from tekoa.core.trees import PyTree
from tekoa.extensions import best_files
from tekoa.fitting import metric_names
from tekoa.store import errors
from tekoa.store.read import load as load_lib

_ITEMS = ("model_params", "model_state", "average", "carry")


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
        best: Load the best checkpoint by this validation metric, such as "accuracy" or
            ("my_score", "max"); by default the newest valid checkpoint.
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
        path = pathlib.Path(best_files.best_dir(path, metric, "eval", mode))
    loaded = load_lib.load_checkpoint(path, step=step, items=_ITEMS)
    params = loaded["average"] if average and loaded.get("average") else loaded["model_params"]
    variables = dict(loaded.get("model_state") or {})
    if loaded.get("carry"):
        variables["carry"] = loaded["carry"]
    fns = any_model.as_model_fns(model, apply)
    if fns.merge is not None:
        fresh_params, fresh_variables = fns.init(jnp.zeros(2, jnp.uint32), ())
        params = _like(fresh_params, params, path)
        variables = _like(fresh_variables, variables, path)
    return any_model.as_object(model, fns, params, variables)


def _like(fresh: PyTree, loaded: PyTree, path: pathlib.Path) -> PyTree:
    """Returns loaded arrays in the structure of fresh ones, after comparing names and shapes."""
    arrays = trees.flatten_named(loaded)
    expected = {name: _stored_shape(leaf) for name, leaf in trees.flatten_named(fresh).items()}
    wrong = [
        f"{name}: {jnp.shape(arrays[name]) if name in arrays else 'missing'} instead of {shape}"
        for name, shape in expected.items()
        if name not in arrays or (jnp.shape(arrays[name]) != shape)
    ]
    wrong += [f"{name}: not in the model" for name in arrays.keys() - expected.keys()]
    if wrong:
        raise errors.MismatchError(
            f"{path}: the checkpoint does not fit the model: {'; '.join(sorted(wrong)[:8])}."
        )

    def as_fresh(name: trees.Name, leaf: Any) -> jax.Array:
        array = jnp.asarray(arrays["/".join(name)])
        is_key = trees.is_key(leaf)
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key else array

    return trees.map_named(as_fresh, fresh)


def _stored_shape(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of the array that a leaf is stored as; random keys are words."""
    return jnp.shape(jax.random.key_data(leaf) if trees.is_key(leaf) else leaf)
