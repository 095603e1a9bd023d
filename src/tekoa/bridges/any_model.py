"""Chooses the bridge for a model without importing libraries that are not loaded."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekoa.core.model import ModelFns, Variables, merge_untrained
from tekoa.core.trees import PyTree


def as_model_fns(
    model: Any = None,
    apply: Callable[..., Any] | None = None,
    *,
    collections: Mapping[str, Sequence[str]] | None = None,
    mutable: Any = True,
    init: Any = None,
    trainable: Any = None,
) -> ModelFns:
    """Creates `ModelFns` from a model of any supported library.

    Args:
        model: `ModelFns`; a Linen, NNX or Equinox module; an Equinox pair (module, state); a
            Haiku transformed pair; a Linen `model.init`; a function `init(rng, *inputs)`; or
            the parameters themselves.
        apply: The function that runs the model, if `model` does not include it.
        collections: For Linen: names of the rng streams at "init" and at "apply".
        mutable: For Linen: which collections training may change.
        init: Another name for `model`.
        trainable: Which parameters to train, as for `TrainTask`; None for all of them.

    Raises:
        TypeError: If no bridge fits, or both `model` and `init` are passed.
    """
    if init is not None:
        if model is not None:
            raise TypeError("Pass either model or init, not both: init is an alias of model.")
        model = init
    if trainable is not None:
        return _restricted(model, apply, trainable, collections=collections, mutable=mutable)
    if isinstance(model, ModelFns):
        return model
    function = model
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", model)
    if collections is not None or _is_module(owner, "flax.linen"):
        from tekoa.bridges import linen

        return linen.model_fns(model, apply, collections=collections, mutable=mutable)
    if apply is None and _is_module(model, "flax.nnx"):
        from tekoa.bridges import nnx

        return nnx.model_fns(model)
    module = model[0] if isinstance(model, tuple) and len(model) == 2 else model
    if apply is None and _is_module(module, "equinox"):
        from tekoa.bridges import equinox

        return equinox.model_fns(model)
    from tekoa.bridges import functions

    if apply is None and type(model).__name__ in ("Transformed", "TransformedWithState"):
        return functions.haiku_model_fns(model)
    if callable(apply):
        return functions.model_fns(model, apply)
    if isinstance(model, type):
        raise TypeError(
            f"{model.__name__} is a class. Pass a model: {model.__name__}(...), with its arguments."
        )
    raise TypeError(
        f"Cannot create a model from {type(model).__name__}. Pass a Linen, NNX or Equinox module, "
        "a Haiku transformed pair, ModelFns, or parameters with apply=fn(params, inputs)."
    )


def as_object(model: Any, fns: ModelFns, params: PyTree, variables: Variables) -> Any:
    """Returns a model with other weights, as an object of its own library.

    Args:
        model: The model from which `fns` was created.
        fns: The model as pure functions.
        params: The weights.
        variables: The other collections.

    Returns:
        An NNX or Equinox module, for inference: without dropout, and with the averages of training;
        for a Linen module, the module bound to the weights, which can be called; for any other
        model, `params`.
    """
    if fns.merge is not None:
        merged = fns.merge(params, variables)
        if _is_module(merged, "flax.nnx"):
            merged.eval()
        return merged
    params, variables = merge_untrained(params, variables)
    if _is_module(model, "flax.linen"):
        return model.bind({"params": params, **variables})
    return params


def _restricted(model: Any, apply: Any, trainable: Any, **options: Any) -> ModelFns:
    """Creates `ModelFns` that train only some of the parameters."""
    from tekoa.bridges import trainable as trainable_lib

    if apply is None and _is_module(model, "flax.nnx"):
        from tekoa.bridges import nnx

        if (selection := nnx.filter_of(trainable)) is not None:
            names = nnx.selected_names(model, selection)
            fns = nnx.model_fns(model, selection)
            return trainable_lib.restrict(fns, lambda name, _: name in names)
    elif isinstance(trainable, type) or trainable is ...:
        raise TypeError(
            f"trainable={trainable!r} is a filter of NNX variables, but the model is "
            f"{type(model).__name__}, not an nnx.Module. Use a pattern or a table of names."
        )
    return trainable_lib.restrict(as_model_fns(model, apply, **options), trainable)


def missing_trainable(model: Any) -> str | None:
    """Returns a hint if a model looks as if only some of its parameters should be trained."""
    if not _is_module(model, "flax.nnx"):
        return None
    from tekoa.bridges import nnx

    if not nnx.has_adapters_and_base(model):
        return None
    return (
        "This model has nnx.LoRA layers, and all its parameters are trained, the base weights too. "
        "To train the adapters alone, pass trainable=nnx.LoRA."
    )


def _is_module(value: Any, library: str) -> bool:
    return isinstance(value, getattr(sys.modules.get(library), "Module", ()))
