"""Traces a model for `scales`, and turns a bad model or batch into a clear message."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from tekoa.core import trees


def checked_leaves(params: trees.PyTree) -> list[Any]:
    """Gives the parameters as arrays or shapes, in the tree's order.

    Raises:
        TypeError: If a leaf is neither.
        ValueError: If there is none.
    """
    leaves = []
    for name, leaf in zip(trees.leaf_names(params), jax.tree.leaves(params), strict=True):
        if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
            raise TypeError(
                f"Parameter {'/'.join(name)!r} is a {type(leaf).__name__}, not an array. Pass "
                "the array part of the model only (nnx.split, eqx.partition)."
            )
        leaves.append(leaf if hasattr(leaf, "shape") else jnp.asarray(leaf))
    if not leaves:
        raise ValueError("There are no parameters: `params` has no leaves.")
    return leaves


def split_static(batch: tuple[Any, ...]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Parts the arrays of a batch from numbers and switches, which stay as they are.

    Returns:
        The arrays, and a function that puts others into their places.
    """
    leaves, treedef = jax.tree.flatten(batch)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def merge(arrays: list[Any]) -> Any:
        merged = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            merged[i] = array
        return treedef.unflatten(merged)

    return [leaves[i] for i in places], merge


def trace(
    fn: Callable[..., Any],
    params: trees.PyTree,
    arrays: list[Any],
    merge: Callable[[list[Any]], Any],
) -> core.ClosedJaxpr:
    """Traces `fn(params, *merge(arrays))` and checks that it can be differentiated.

    Raises:
        ValueError: If it cannot be traced or differentiated.
    """

    def outputs(params: trees.PyTree, arrays: list[Any]) -> Any:
        return fn(params, *merge(arrays))

    try:
        jaxpr = jax.make_jaxpr(outputs)(params, arrays)
    except Exception as error:
        shapes = jax.tree.map(_shape_text, merge(arrays))
        raise ValueError(
            f"The model cannot be traced on a batch of {shapes}: {_first_line(error)} "
            "Check the batch against what fn(params, *batch) expects."
        ) from error
    avals: list[Any] = [v.aval for v in jaxpr.jaxpr.outvars]
    if not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals):
        dtypes = [str(aval.dtype) for aval in avals]
        raise ValueError(
            f"The function is not differentiable: its outputs are {dtypes}, none of them "
            "floating. Return the loss or the logits, not predictions."
        )
    _check_differentiable(outputs, params, arrays)
    return jaxpr


def _check_differentiable(
    outputs: Callable[..., Any], params: trees.PyTree, arrays: list[Any]
) -> None:
    leaves, treedef = jax.tree.flatten(params)
    learned = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(_dtype(leaf), jnp.inexact)]

    def gradients(floats: list[Any], leaves: list[Any], arrays: list[Any]) -> Any:
        def floating_outputs(floats: list[Any]) -> list[Any]:
            merged = list(leaves)
            for i, x in zip(learned, floats, strict=True):
                merged[i] = x
            outs = jax.tree.leaves(outputs(treedef.unflatten(merged), arrays))
            return [out for out in outs if jnp.issubdtype(_dtype(out), jnp.inexact)]

        outs, pull_back = jax.vjp(floating_outputs, floats)
        return pull_back([jnp.zeros_like(out) for out in outs])

    try:
        jax.eval_shape(gradients, [leaves[i] for i in learned], leaves, arrays)
    except Exception as error:
        raise ValueError(
            f"The function is not differentiable with respect to its parameters: "
            f"{_first_line(error)} Amos needs gradients of what fn(params, *batch) returns."
        ) from error


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _shape_text(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}."
