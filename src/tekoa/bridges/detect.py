"""Finds the bridge that fits a model, importing no library that is not loaded."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekoa.core.model import ModelFns


def as_model_fns(
    init: Any,
    apply: Callable[..., Any] | None = None,
    *,
    collections: Mapping[str, Sequence[str]] | None = None,
    mutable: bool | Sequence[str] = True,
) -> ModelFns:
    """Makes `ModelFns` of whatever a user calls a model.

    Args:
        init: `ModelFns`; a Linen, NNX or Equinox module; an Equinox pair (module, state);
            Haiku's transformed pair; a Linen `model.init`; a function `init(rng, *inputs)`;
            or the parameters themselves.
        apply: The function that runs the model, where `init` does not know it.
        collections: For Linen: names of the rng streams at "init" and at "apply".
        mutable: For Linen: which collections training may change.

    Raises:
        TypeError: If no bridge fits.
    """
    if isinstance(init, ModelFns):
        return init
    owner = getattr(_unwrapped(init), "__self__", init)
    if collections is not None or _is(owner, "flax.linen", "Module"):
        from tekoa.bridges import linen

        return linen.model_fns(init, apply, collections=collections, mutable=mutable)
    if apply is None and _is(init, "flax.nnx", "Module"):
        from tekoa.bridges import nnx

        return nnx.model_fns(init)
    first = init[0] if isinstance(init, tuple) and len(init) == 2 else init
    if apply is None and _is(first, "equinox", "Module"):
        from tekoa.bridges import equinox

        return equinox.model_fns(init)
    from tekoa.bridges import functions

    if apply is None and type(init).__name__ in ("Transformed", "TransformedWithState"):
        return functions.haiku_model_fns(init)
    if callable(apply):
        return functions.model_fns(init, apply)
    raise TypeError(
        f"Cannot make a model of {type(init).__name__}. Pass a Linen, NNX or Equinox module, a "
        "Haiku transformed pair, ModelFns, or init and apply functions."
    )


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is(value: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
