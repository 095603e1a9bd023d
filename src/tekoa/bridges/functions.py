"""Plain functions and Haiku transformed pairs as pure functions."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core.model import ModelFns, Variables
from tekoa.core.trees import PyTree


def model_fns(init: Callable[..., Any] | PyTree, apply: Callable[..., Any]) -> ModelFns:
    """Creates `ModelFns` from plain functions.

    Args:
        init: `init(rng, *inputs) -> params`, or the initial parameters themselves.
        apply: `apply(params, *inputs) -> outputs`, or `apply(params, rng, *inputs)` as in
            Haiku. Arguments named `rng`, `train`, `training`, `is_training`,
            `deterministic` and `variables` are passed by name. With `variables`, init
            returns `(params, variables)` and apply returns `(outputs, variables)`.
    """
    accepted = list(inspect.signature(apply).parameters)
    has_variables = "variables" in accepted
    is_rng_second = accepted[1:2] == ["rng"]

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        initial = init(rng, *inputs) if callable(init) else jax.tree.map(jnp.array, init)
        if not has_variables:
            return initial, {}
        if not (isinstance(initial, tuple) and len(initial) == 2 and isinstance(initial[1], dict)):
            raise TypeError(
                "apply accepts `variables`, so init must return (params, variables), where "
                f"variables is a dict of collections; got {type(initial).__name__}."
            )
        return initial

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        available = {"rng": rng, "variables": variables, **train_arguments(train)}
        named = {name: value for name, value in available.items() if name in accepted}
        if is_rng_second:
            inputs = (named.pop("rng"), *inputs)
        result = apply(params, *inputs, **named)
        return result if has_variables else (result, {})

    return ModelFns(init=init_fn, apply=apply_fn)


def train_arguments(train: bool) -> dict[str, bool]:
    """Returns the arguments that tell models whether they are training, by usual name.

    >>> train_arguments(False)['deterministic']
    True
    """
    return {"train": train, "training": train, "is_training": train, "deterministic": not train}


def haiku_model_fns(transformed: Any) -> ModelFns:
    """Creates `ModelFns` from the result of `hk.transform` or `hk.transform_with_state`."""
    has_state = type(transformed).__name__ == "TransformedWithState"

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        initial = transformed.init(rng, *inputs)
        return (initial[0], {"state": initial[1]}) if has_state else (initial, {})

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        if not has_state:
            return transformed.apply(params, rng, *inputs), {}
        outputs, state = transformed.apply(params, variables["state"], rng, *inputs)
        return outputs, {"state": state} if train else {}

    return ModelFns(init=init_fn, apply=apply_fn)
