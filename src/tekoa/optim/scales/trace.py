"""Traces a model to a jaxpr, with clear errors for unsuitable models and batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from tekoa.core import messages, trees

FOR_LIBRARIES = (
    "For a model of Flax, Equinox or Haiku, use tekoa.find_scales(model, loss, batch) and pass "
    "the table to tekoa.sphere, or its eta_fn and shape_fn to tekoa.amos."
)


def check_leaves(params: trees.PyTree) -> list[Any]:
    """Returns the parameters as arrays or shapes, in the tree's order.

    Raises:
        TypeError: If a leaf is neither.
        ValueError: If there are none.
    """
    leaves = []
    for name, leaf in zip(trees.leaf_names(params), jax.tree.leaves(params), strict=True):
        if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
            raise TypeError(
                f"Parameter {'/'.join(name)!r} is a {type(leaf).__name__}, not an array. "
                f"{FOR_LIBRARIES}"
            )
        leaves.append(leaf if hasattr(leaf, "shape") else jnp.asarray(leaf))
    if not leaves:
        raise ValueError("There are no parameters: `params` has no leaves.")
    return leaves


def split_static(
    tree: trees.PyTree, is_dynamic: Callable[[Any], bool] = lambda leaf: hasattr(leaf, "shape")
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Separates dynamic leaves, by default arrays, from static ones: numbers, strings, flags.

    Returns:
        The dynamic leaves, and a function that returns the tree with others in their place.
    """
    leaves, treedef = jax.tree.flatten(tree)
    positions = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]

    def merge(dynamic: list[Any]) -> Any:
        merged = dict(enumerate(leaves)) | dict(zip(positions, dynamic, strict=True))
        return treedef.unflatten(merged.values())

    return [leaves[i] for i in positions], merge


class TraceError(ValueError):
    """The function failed on the batch; its own error is the cause."""


def trace(
    fn: Callable[..., Any],
    params: trees.PyTree,
    arrays: list[Any],
    merge: Callable[[list[Any]], Any],
) -> core.ClosedJaxpr:
    """Traces `fn(params, *merge(arrays))` and checks that it can be differentiated.

    Raises:
        TraceError: If it cannot be traced.
        ValueError: If it cannot be differentiated.
    """

    def outputs(params: trees.PyTree, arrays: list[Any]) -> Any:
        return fn(params, *merge(arrays))

    try:
        jaxpr = jax.make_jaxpr(outputs)(params, arrays)
    except Exception as error:
        shapes = jax.tree.map(_shape_text, merge(arrays))
        # An NNX or Equinox module can be called, but not as fn(params, *batch).
        hint = "" if hasattr(fn, "__name__") else f" {FOR_LIBRARIES}"
        raise TraceError(
            f"The model cannot be traced on a batch of {shapes}: {_first_line(error)} "
            f"Check that the batch has the arguments of fn(params, *batch).{hint}"
        ) from error
    avals: list[Any] = [v.aval for v in jaxpr.jaxpr.outvars]
    if not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals):
        dtypes = [str(aval.dtype) for aval in avals]
        raise ValueError(
            f"The function is not differentiable: its outputs are {dtypes}, not floating-point. "
            "Return the loss or the logits, not predictions."
        )
    _check_differentiable(outputs, params, arrays)
    return jaxpr


def _check_differentiable(
    outputs: Callable[..., Any], params: trees.PyTree, arrays: list[Any]
) -> None:
    def gradients(params: trees.PyTree, arrays: list[Any]) -> Any:
        floats, merge = split_static(params, _is_float)

        def floating_outputs(floats: list[Any]) -> list[Any]:
            return [
                out for out in jax.tree.leaves(outputs(merge(floats), arrays)) if _is_float(out)
            ]

        outs, pull_back = jax.vjp(floating_outputs, floats)
        return pull_back([jnp.zeros_like(out) for out in outs])

    try:
        jax.eval_shape(gradients, params, arrays)
    except Exception as error:
        raise ValueError(
            f"The function is not differentiable with respect to its parameters: "
            f"{_first_line(error)} Amos needs gradients of what fn(params, *batch) returns."
        ) from error


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _shape_text(x: Any) -> str:
    return messages.array_text(x.dtype, x.shape) if hasattr(x, "shape") else repr(x)


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}."
