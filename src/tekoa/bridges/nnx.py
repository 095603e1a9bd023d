"""Flax NNX modules as pure functions, split explicitly and run under `jax.jit`.

Parameters and other variables are plain nested dicts. JAX flattens those much faster than
`nnx.State`, and flattening dominates the dispatch time of a small step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tekoa.core import trees
from tekoa.core.model import LogicalAxes, ModelFns, Variables
from tekoa.core.trees import PyTree


class Carry(nnx.Variable):
    """A variable that a recurrent NNX model passes from batch to batch; saved with the state."""


def model_fns(module: nnx.Module, trainable: Any = None) -> ModelFns:
    """Creates `ModelFns` from an NNX module; its weights are the initial parameters.

    The module itself is not modified; `merge` returns a trained copy. Dropout and batch
    norm follow `module.train()` and `module.eval()`.

    Args:
        module: The module.
        trainable: A filter of variables that are parameters besides those of type `nnx.Param`.
    """
    graphs = {train: _graph(module, train) for train in (True, False, None)}
    filters = (nnx.Param if trainable is None else nnx.Any(nnx.Param, trainable), Carry, ...)
    _, *states = nnx.split(module, *filters)
    codecs = [_StateCodec(state) for state in states]

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        del rng, inputs  # The module is initialised already.
        copies = (jax.tree.map(jnp.copy, state) for state in states)
        params, carry, rest = (c.to_dict(copy) for c, copy in zip(codecs, copies, strict=True))
        return params, _variables(carry, rest)

    def axes_fn(rng: Any, inputs: tuple[Any, ...]) -> LogicalAxes:
        del rng, inputs
        return {
            (collection, *name): axes
            for collection, state in zip(("params", "carry", "state"), states, strict=True)
            for name, axes in _logical_axes(state).items()
        }

    def merge(params: PyTree, variables: Variables, train: bool | None = None) -> nnx.Module:
        dicts = params, variables.get("carry", {}), variables.get("state", {})
        states = (codec.to_state(pure) for codec, pure in zip(codecs, dicts, strict=True))
        return nnx.merge(graphs[train], *states)

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        del rng  # NNX modules hold their own random streams.
        live = merge(params, variables, train)
        outputs = live(*inputs)
        nnx.pop(live, nnx.Intermediate)
        _, _, carry, rest = nnx.split(live, *filters)
        return outputs, _variables(codecs[1].to_dict(carry), codecs[2].to_dict(rest))

    return ModelFns(init=init_fn, apply=apply_fn, merge=merge, axes=axes_fn, native=_as_state)


def filter_of(trainable: Any) -> Any:
    """Returns the NNX filter that a value of `trainable` is, or None if it is something else."""
    if trainable is nnx.LoRA:  # The module; its parameters are meant.
        return nnx.LoRAParam
    if isinstance(trainable, nnx.Optimizer):
        return trainable.wrt
    if isinstance(trainable, (list, tuple)) and trainable:
        filters = [filter_of(entry) for entry in trainable]
        return None if None in filters else filters
    return trainable if trainable is ... or callable(trainable) else None


def selected_names(module: nnx.Module, trainable: Any) -> set[trees.Name]:
    """Returns the names of the variables that a filter selects."""
    return set(trees.leaf_names(nnx.state(module, trainable)))


def has_adapters_and_base(module: nnx.Module) -> bool:
    """Whether a module has LoRA parameters and others, so that some are usually not trained."""
    kinds = {
        isinstance(variable, nnx.LoRAParam)
        for _, variable in nnx.iter_graph(module)
        if isinstance(variable, nnx.Param)
    }
    return kinds == {True, False}


def _as_state(params: PyTree) -> nnx.State:
    """Returns parameters as the pure state that an `nnx.Optimizer` passes to its transformation."""
    named = {path: leaf for path, leaf in nnx.to_flat_state(nnx.State(params)) if leaf is not None}
    return nnx.from_flat_state(named)


class _StateCodec:
    """Converts an `nnx.State` to a plain dict and back."""

    def __init__(self, state: nnx.State):
        self._treedef = jax.tree.structure(state)
        self._names = trees.leaf_names(state)
        pure = nnx.to_pure_dict(state)
        if trees.leaf_names(pure) != self._names:
            raise TypeError(
                "The variables of this NNX module are ordered differently as a plain dict: "
                f"{self._names} became {trees.leaf_names(pure)}."
            )

    def to_dict(self, state: nnx.State) -> dict[str, Any]:
        names = trees.leaf_names(state)
        if names != self._names:
            changed = sorted({"/".join(n) for n in set(names) ^ set(self._names)})
            raise TypeError(
                f"The model's call adds or removes the variables {changed}. Create all variables "
                "in the module's constructor."
            )
        return nnx.to_pure_dict(state)

    def to_state(self, pure: dict[str, Any]) -> nnx.State:
        return jax.tree.unflatten(self._treedef, jax.tree.leaves(pure))


def _logical_axes(state: nnx.State) -> dict[trees.Name, tuple[Any, ...]]:
    """Reads the logical axes of variables, as set by `nnx.with_partitioning`."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes_by_name = {}
    for name, variable in trees.named_leaves(state, is_leaf=is_variable).items():
        metadata = variable.get_metadata()
        axes = metadata.get("out_sharding") or metadata.get("sharding")
        axes = getattr(axes, "spec", axes)
        if isinstance(axes, (tuple, jax.P)):
            axes_by_name[name] = tuple(axes)
    return axes_by_name


def _variables(carry: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    variables = {"carry": carry, "state": rest}
    return {name: tree for name, tree in variables.items() if tree}


def _graph(module: nnx.Module, train: bool | None) -> Any:
    if train is None:
        return nnx.graphdef(module)
    copy = nnx.clone(module)
    copy.train() if train else copy.eval()
    return nnx.graphdef(copy)
