"""Flax NNX modules as pure functions, split explicitly and run under `jax.jit`.

Parameters and other variables travel as plain nested dicts: jax flattens those much
faster than `nnx.State`, which is most of the cost of dispatching a small step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tekoa.core import trees
from tekoa.core.model import ModelFns, Variables
from tekoa.core.trees import PyTree


class Carry(nnx.Variable):
    """What a recurrent NNX model hands from batch to batch; it is saved with the state."""


def model_fns(module: nnx.Module) -> ModelFns:
    """Makes `ModelFns` of an NNX module, whose weights are the initial ones.

    The module itself is left as it is; `merge` gives a trained copy. Dropout and batch
    norm follow `module.train()` and `module.eval()`.
    """
    graphs = {
        True: _graph(module, train=True),
        False: _graph(module, train=False),
        None: nnx.graphdef(module),
    }
    filters = (nnx.Param, Carry, ...)
    _, *states = nnx.split(module, *filters)
    forms = [_Form(state) for state in states]

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        del rng, inputs  # The module has its weights already.
        copies = (jax.tree.map(jnp.copy, state) for state in states)
        params, carry, rest = (form.pure(copy) for form, copy in zip(forms, copies, strict=True))
        return params, _variables(carry, rest)

    def axes_fn(rng: Any, inputs: tuple[Any, ...]) -> dict[trees.Name, tuple[Any, ...]]:
        del rng, inputs
        collections = zip(("params", "carry", "state"), states, strict=True)
        return {
            (collection, *name): axes
            for collection, state in collections
            for name, axes in _logical_axes(state).items()
        }

    def merge(params: PyTree, variables: Variables, train: bool | None = None) -> nnx.Module:
        parts = params, variables.get("carry", {}), variables.get("state", {})
        full = (form.state(part) for form, part in zip(forms, parts, strict=True))
        return nnx.merge(graphs[train], *full)

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        del rng  # NNX modules hold their own random streams.
        live = merge(params, variables, train)
        outputs = live(*inputs)
        nnx.pop(live, nnx.Intermediate)  # What a call only notes down is not kept.
        _, _, carry, rest = nnx.split(live, *filters)
        return outputs, _variables(forms[1].pure(carry), forms[2].pure(rest))

    return ModelFns(init=init_fn, apply=apply_fn, merge=merge, axes=axes_fn)


class _Form:
    """Turns one kind of state into a plain dict and back."""

    def __init__(self, state: nnx.State):
        self._treedef = jax.tree.structure(state)
        self._names = trees.leaf_names(state)
        pure = nnx.to_pure_dict(state)
        if trees.leaf_names(pure) != self._names:
            raise TypeError(
                "The variables of this NNX module do not keep their order as a plain dict: "
                f"{self._names} against {trees.leaf_names(pure)}."
            )

    def pure(self, state: nnx.State) -> dict[str, Any]:
        names = trees.leaf_names(state)
        if names != self._names:
            changed = sorted({"/".join(n) for n in set(names) ^ set(self._names)})
            raise TypeError(f"The model's call adds or removes the variables {changed}.")
        return nnx.to_pure_dict(state)

    def state(self, pure: dict[str, Any]) -> nnx.State:
        return jax.tree.unflatten(self._treedef, jax.tree.leaves(pure))


def _logical_axes(state: nnx.State) -> dict[trees.Name, tuple[Any, ...]]:
    """Reads the axes that variables were given, by `nnx.with_partitioning` for one."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    found = {}
    names = trees.leaf_names(state, is_leaf=is_variable)
    for name, variable in zip(names, jax.tree.leaves(state, is_leaf=is_variable), strict=True):
        metadata = variable.get_metadata()
        axes = metadata.get("out_sharding") or metadata.get("sharding")
        axes = getattr(axes, "spec", axes)
        if isinstance(axes, (tuple, jax.P)):
            found[name] = tuple(axes)
    return found


def _variables(carry: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    variables = {"carry": carry, "state": rest}
    return {name: tree for name, tree in variables.items() if tree}


def _graph(module: nnx.Module, *, train: bool) -> Any:
    copy = nnx.clone(module)
    copy.train() if train else copy.eval()
    return nnx.graphdef(copy)
