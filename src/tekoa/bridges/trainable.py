"""Trains a part of a model's parameters; the others stay as they are.

Parameters that are not trained are a collection of variables. So they have no gradients, no
optimizer state and no moving average, and no step changes them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from tekoa.core import messages, rules, trees
from tekoa.core.model import (
    UNTRAINED,
    LogicalAxes,
    ModelFns,
    Variables,
    axes_also_in,
    merge_untrained,
)
from tekoa.core.trees import PyTree

_WORDS = {"train": True, "freeze": False}


def restrict(fns: ModelFns, trainable: Any) -> ModelFns:
    """Returns a model that trains only some of its parameters.

    Args:
        fns: The model.
        trainable: A pattern searched in the names of parameters; a table of pattern to True or
            'train', False or 'freeze', of which the first match wins; a tree of booleans with the
            structure of the parameters or a part of it; or `fn(name, array)`, where the name is a
            tuple of strings.

    Returns:
        The model. `init` raises ValueError if nothing would be trained, and `NoRuleError` if a
        parameter matches no pattern of a table.

    Raises:
        TypeError: If `trainable` is anything else.
    """
    if not (callable(trainable) or isinstance(trainable, str) or jax.tree.leaves(trainable)):
        raise TypeError(
            "trainable must be a pattern, a table of pattern to True or False, a tree of booleans, "
            f"fn(name, array), or for an NNX module an nnx filter; got {trainable!r}."
        )

    def init(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        params, variables = fns.init(rng, inputs)
        is_trained = _trained(params, trainable)
        if not any(is_trained.values()):
            names = ["/".join(name) for name in is_trained]
            raise ValueError(
                f"trainable={trainable!r} selects no parameter. The parameters are: "
                f"{messages.some_of(names, limit=12)}."
            )
        trained = trees.map_named(lambda name, x: x if is_trained[name] else None, params)
        untrained = trees.map_named(lambda name, x: None if is_trained[name] else x, params)
        if not jax.tree.leaves(untrained):
            return params, variables
        return trained, {**variables, UNTRAINED: untrained}

    inner_merge = fns.merge

    def merge(params: PyTree, variables: Variables) -> Any:
        return inner_merge and inner_merge(*merge_untrained(params, variables))

    def axes(rng: Any, inputs: tuple[Any, ...]) -> LogicalAxes:
        return axes_also_in(UNTRAINED, {} if fns.axes is None else fns.axes(rng, inputs))

    return dataclasses.replace(fns, init=init, merge=inner_merge and merge, axes=axes)


def _trained(params: PyTree, trainable: Any) -> dict[trees.Name, bool]:
    """Returns whether each parameter is trained, by name."""
    leaves = trees.named_leaves(params)
    if isinstance(trainable, str):
        trainable = {trainable: True, "": False}
    if _is_function(trainable):
        return {name: bool(trainable(name, leaf)) for name, leaf in leaves.items()}
    if _is_table(trainable, leaves):
        values = rules.map_rules({p: _as_bool(p, v) for p, v in trainable.items()}, params)
        return trees.named_leaves(values)
    mask = trees.named_leaves(trainable)
    return {name: _in_mask(name, mask) for name in leaves}


def _is_function(trainable: Any) -> bool:
    """Whether a value is a function, and not a callable module with booleans as leaves."""
    return callable(trainable) and jax.tree_util.all_leaves([trainable])


def _is_table(trainable: Any, leaves: Mapping[trees.Name, Any]) -> bool:
    """Whether a value is a table of patterns, and not a tree of booleans."""
    if not isinstance(trainable, Mapping):
        return False
    is_flat = all(isinstance(value, (bool, str)) for value in trainable.values())
    return is_flat and set(map(str, trainable)) != {name[0] for name in leaves if name}


def _as_bool(pattern: str, value: Any) -> bool:
    if isinstance(value, str) and value not in _WORDS:
        raise ValueError(
            f"trainable[{pattern!r}] must be True, False, 'train' or 'freeze', got {value!r}."
        )
    return _WORDS[value] if isinstance(value, str) else bool(value)


def _in_mask(name: trees.Name, mask: Mapping[trees.Name, Any]) -> bool:
    prefix = next((name[:n] for n in range(len(name), -1, -1) if name[:n] in mask), None)
    if prefix is None:
        raise ValueError(
            f"trainable has no entry for parameter {'/'.join(name)!r}. It has "
            f"{messages.some_of(['/'.join(n) for n in mask], limit=8)}."
        )
    return bool(mask[prefix])
