"""Equinox modules as pure functions.

An Equinox module is written for a single example, so it is vmapped over the batch.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.core.model import ModelFns, Variables
from tekoa.core.trees import PyTree

# Imported by name: this file is also called equinox, which confuses type checkers.
eqx: Any = importlib.import_module("equinox")

AXIS = "batch"


def model_fns(module: Any) -> ModelFns:
    """Creates `ModelFns` from an Equinox module; its weights are the initial parameters.

    Args:
        module: A module for a single example, or the pair `(module, state)` returned by
            `eqx.nn.make_with_state`. In training it gets `key=` if its call accepts one. The
            state, if there is one, is the last positional argument.
    """
    module, state = module if isinstance(module, tuple) else (module, None)
    params, _ = eqx.partition(module, eqx.is_inexact_array)
    statics = {
        train: eqx.partition(eqx.nn.inference_mode(module, not train), eqx.is_inexact_array)[1]
        for train in (True, False)
    }
    names, params_def = trees.leaf_names(params), jax.tree.structure(params)
    state_leaves, state_def = jax.tree.flatten(state)
    accepts_key = "key" in inspect.signature(type(module).__call__).parameters

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        del rng, inputs  # The module is initialised already.
        variables = {} if state is None else {"state": [jnp.copy(x) for x in state_leaves]}
        return jax.tree.map(jnp.copy, trees.nest(trees.named_leaves(params))), variables

    def merge(params: PyTree, variables: Variables, train: bool = False) -> Any:
        leaves = trees.named_leaves(params)
        arrays = jax.tree.unflatten(params_def, [leaves[name] for name in names])
        merged = eqx.combine(arrays, statics[train])
        if state is None:
            return merged
        return merged, jax.tree.unflatten(state_def, variables["state"])

    def native(params: PyTree) -> Any:
        leaves = trees.named_leaves(params)
        return jax.tree.unflatten(params_def, [leaves.get(name) for name in names])

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        live = merge(params, variables, train)
        n_rows = batches.n_rows(inputs)
        keys = {"key": jax.random.split(rng, n_rows)} if accepts_key and train else {}
        with _explained_rows():
            if state is None:
                return jax.vmap(lambda xs, kw: live(*xs, **kw), axis_name=AXIS)(inputs, keys), {}
            live, live_state = live
            outputs, live_state = jax.vmap(
                lambda xs, kw: live(*xs, live_state, **kw), axis_name=AXIS, out_axes=(0, None)
            )(inputs, keys)
        return outputs, {"state": jax.tree.leaves(live_state)} if train else {}

    return ModelFns(init=init_fn, apply=apply_fn, merge=merge, native=native)


@contextlib.contextmanager
def _explained_rows() -> Iterator[None]:
    """Adds to an error of a module that it receives one row, and not the batch."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "An Equinox module is called with one row, without the batch axis: Tekoa applies "
            "jax.vmap. Write it for a single example, or pass functions as the model."
        )
        raise
