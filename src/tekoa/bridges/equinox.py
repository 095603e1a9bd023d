"""Equinox modules as pure functions.

An Equinox module is written for one example; it is mapped over the rows of a batch.
"""

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.core.model import ModelFns, Variables
from tekoa.core.trees import PyTree

# By its name: this file is called so too, which leads type checkers astray.
eqx: Any = importlib.import_module("equinox")

AXIS = "batch"


def model_fns(module: Any) -> ModelFns:
    """Makes `ModelFns` of an Equinox module, whose weights are the initial ones.

    Args:
        module: A module for one example, or the pair `(module, state)` that
            `eqx.nn.make_with_state` gives. It is called with `key=` in training where it
            takes one, and with the state last where there is one.
    """
    module, state = module if isinstance(module, tuple) else (module, None)
    params, _ = eqx.partition(module, eqx.is_inexact_array)
    statics = {
        train: eqx.partition(eqx.nn.inference_mode(module, not train), eqx.is_inexact_array)[1]
        for train in (True, False)
    }
    form = _Form(params)
    state_leaves, state_def = jax.tree.flatten(state)
    takes_key = "key" in inspect.signature(type(module).__call__).parameters

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        del rng, inputs  # The module has its weights already.
        variables = {} if state is None else {"state": [jnp.copy(x) for x in state_leaves]}
        return jax.tree.map(jnp.copy, form.nested(params)), variables

    def merge(params: PyTree, variables: Variables, train: bool = False) -> Any:
        merged = eqx.combine(form.tree(params), statics[train])
        if state is None:
            return merged
        return merged, jax.tree.unflatten(state_def, variables["state"])

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        live = merge(params, variables, train)
        n_rows = batches.n_rows(inputs)
        keys = {"key": jax.random.split(rng, n_rows)} if takes_key and train else {}
        if state is None:
            return jax.vmap(lambda xs, kw: live(*xs, **kw), axis_name=AXIS)(inputs, keys), {}
        live, live_state = live
        outputs, live_state = jax.vmap(
            lambda xs, kw: live(*xs, live_state, **kw), axis_name=AXIS, out_axes=(0, None)
        )(inputs, keys)
        return outputs, {"state": jax.tree.leaves(live_state)} if train else {}

    return ModelFns(init=init_fn, apply=apply_fn, merge=merge)


class _Form:
    """Turns a module's arrays into a nested dict by name, and back."""

    def __init__(self, params: Any):
        self._names = trees.leaf_names(params)
        self._treedef = jax.tree.structure(params)

    def nested(self, params: Any) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for name, leaf in zip(self._names, jax.tree.leaves(params), strict=True):
            node = nested
            for part in name[:-1]:
                node = node.setdefault(part, {})
            node[name[-1]] = leaf
        return nested

    def tree(self, nested: dict[str, Any]) -> Any:
        return jax.tree.unflatten(self._treedef, [_at(nested, name) for name in self._names])


def _at(nested: dict[str, Any], name: Sequence[str]) -> Any:
    for part in name:
        nested = nested[part]
    return nested
