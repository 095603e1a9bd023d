"""Trained models for inference."""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.bridges import any_model
from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.core.model import UNTRAINED, ModelFns
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
    if untrained := variables.pop(UNTRAINED, None):
        params = trees.nest({**trees.named_leaves(untrained), **trees.named_leaves(params)})
    if loaded.get("carry"):
        variables["carry"] = loaded["carry"]
    fns = any_model.as_model_fns(model, apply)
    if fns.merge is not None:
        fresh_params, fresh_variables = fns.init(jnp.zeros(2, jnp.uint32), ())
        params = _like(fresh_params, params, path)
        variables = _like(fresh_variables, variables, path)
    else:
        _check_model(fns, params, variables, loaded["meta"].get("inputs"), path)
    return any_model.as_object(model, fns, params, variables)


def _check_model(
    fns: ModelFns, params: PyTree, variables: PyTree, inputs: Any, path: pathlib.Path
) -> None:
    """Compares the weights with those that the model creates for the inputs of its training.

    Args:
        fns: The model, whose weights depend on its inputs.
        params: The weights that were read.
        variables: The other collections that were read.
        inputs: The recorded shapes of the inputs; checkpoints of earlier versions have none.
        path: Where the weights come from.

    Raises:
        errors.MismatchError: If names or shapes differ.
    """
    if inputs is None:
        return
    try:
        fresh = jax.eval_shape(fns.init, jax.random.key(0), batches.shapes_from_json(inputs))
    except jax.errors.JAXTypeError:
        return  # The model's init needs values, not only shapes.
    except Exception as error:
        raise errors.MismatchError(
            f"{path}: the model cannot be initialised with the inputs of the run, {inputs}: {error}"
        ) from error
    _check_same(trees.flatten_named(fresh[0]), trees.flatten_named(params), path)
    expected, others = (
        # The carry has one row per example of a batch, on all hosts.
        trees.flatten_named({name: tree for name, tree in rest.items() if name != "carry"})
        for rest in (fresh[1], variables)
    )
    _check_same(expected, others, path)


def _like(fresh: PyTree, loaded: PyTree, path: pathlib.Path) -> PyTree:
    """Returns loaded arrays in the structure of fresh ones, after comparing names and shapes."""
    arrays = trees.flatten_named(loaded)
    _check_same(trees.flatten_named(fresh), arrays, path)

    def as_fresh(name: trees.Name, leaf: Any) -> jax.Array:
        array = jnp.asarray(arrays["/".join(name)])
        is_key = trees.is_key(leaf)
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key else array

    return trees.map_named(as_fresh, fresh)


def _check_same(expected: Mapping[str, Any], arrays: Mapping[str, Any], path: pathlib.Path) -> None:
    """Raises if the names or shapes of two trees differ."""
    wrong = [
        f"{name}: {jnp.shape(arrays[name]) if name in arrays else 'missing'} instead of {shape}"
        for name, shape in ((name, _stored_shape(leaf)) for name, leaf in expected.items())
        if name not in arrays or jnp.shape(arrays[name]) != shape
    ]
    wrong += [f"{name}: not in the model" for name in arrays.keys() - expected.keys()]
    if wrong:
        raise errors.MismatchError(
            f"{path}: the checkpoint does not fit the model: {'; '.join(sorted(wrong)[:8])}."
        )


def _stored_shape(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of the array that a leaf is stored as; random keys are words."""
    is_key = trees.is_key(leaf)
    return jax.eval_shape(jax.random.key_data, leaf).shape if is_key else jnp.shape(leaf)
