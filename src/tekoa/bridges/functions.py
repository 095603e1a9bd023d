"""Plain functions and Haiku's transform pairs as pure functions of one form."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core.model import ModelFns, Variables
from tekoa.core.trees import PyTree


def model_fns(init: Callable[..., Any] | PyTree, apply: Callable[..., Any]) -> ModelFns:
    """Makes `ModelFns` of plain functions.

    Args:
        init: `init(rng, *inputs) -> params`, or the initial parameters themselves.
        apply: `apply(params, *inputs) -> outputs`, or `apply(params, rng, *inputs)` as Haiku
            has it. Arguments named `rng`, `train`, `training`, `is_training`,
            `deterministic` and `variables` are handed over by name; with `variables`, init
            gives `(params, variables)` and apply gives `(outputs, variables)`.
    """
    accepted = list(inspect.signature(apply).parameters)
    has_variables = "variables" in accepted
    is_rng_second = accepted[1:2] == ["rng"]

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        made = init(rng, *inputs) if callable(init) else jax.tree.map(jnp.array, init)
        if not has_variables:
            return made, {}
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
            raise TypeError(
                "apply takes `variables`, so init must give (params, variables) with variables "
                f"a dict of collections; got {type(made).__name__}."
            )
        return made

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        offered = {"rng": rng, "variables": variables, **train_words(train)}
        named = {name: value for name, value in offered.items() if name in accepted}
        if is_rng_second:
            inputs = (named.pop("rng"), *inputs)
        result = apply(params, *inputs, **named)
        return result if has_variables else (result, {})

    return ModelFns(init=init_fn, apply=apply_fn)


def train_words(train: bool) -> dict[str, bool]:
    """The names by which models ask whether they are being trained, with the answers.

    >>> train_words(False)['deterministic']
    True
    """
    return {"train": train, "training": train, "is_training": train, "deterministic": not train}


def haiku_model_fns(transformed: Any) -> ModelFns:
    """Makes `ModelFns` of what `hk.transform` or `hk.transform_with_state` gives."""
    has_state = type(transformed).__name__ == "TransformedWithState"

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        made = transformed.init(rng, *inputs)
        return (made[0], {"state": made[1]}) if has_state else (made, {})

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        if not has_state:
            return transformed.apply(params, rng, *inputs), {}
        outputs, state = transformed.apply(params, variables["state"], rng, *inputs)
        return outputs, {"state": state} if train else {}

    return ModelFns(init=init_fn, apply=apply_fn)
