"""Flax Linen modules as pure functions: collections, rngs, train and eval mode."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.core
import flax.core.scope
import jax
from flax import linen as nn

from tekoa.bridges import functions
from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.core.model import LogicalAxes, ModelFns, Variables
from tekoa.core.trees import PyTree
from tekoa.sharding import layout as layout_lib

Collections = Mapping[str, Sequence[str]]
CollectionFilter = flax.core.scope.CollectionFilter

_DROPPED = ("intermediates",)
_AXES = "_axes"


def model_fns(
    init: Any,
    apply: Callable[..., Any] | None = None,
    *,
    collections: Collections | None = None,
    mutable: CollectionFilter = True,
) -> ModelFns:
    """Creates `ModelFns` from a Linen module, or from its `init` and `apply`.

    Args:
        init: A module, or `module.init`.
        apply: `module.apply`, the default if `init` is a module.
        collections: Names of the rng streams at "init" and at "apply".
        mutable: Which collections training may change: all (True), none (False), those named, or
            all but those in a `flax.core.DenyList`. Evaluation changes only 'carry'.

    Returns:
        The model's functions. A call argument named train, training, is_training or
        deterministic is set to the current mode.
    """
    module = init if isinstance(init, nn.Module) else None
    if module is not None:
        init, apply = module.init, apply or module.apply
    if apply is None:
        raise TypeError("A Linen model needs apply as well as init: pass apply=model.apply.")
    streams = {"init": ("params", "dropout"), "apply": ("dropout",), **(collections or {})}

    def init_boxed(rng: jax.Array, inputs: tuple[Any, ...]) -> Any:
        return init(rngs_of(rng, streams["init"]), *inputs, **_mode(init, train=False))

    @jax.jit  # Without jit, every operation would be compiled separately.
    def init_arrays(rng: jax.Array, inputs: tuple[Any, ...]) -> Any:
        return nn.meta.unbox(flax.core.unfreeze(init_boxed(rng, inputs)))

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        initial = init_arrays(rng, inputs)
        if not isinstance(initial, Mapping) or "params" not in initial:
            keys = sorted(initial) if isinstance(initial, Mapping) else ""
            raise TypeError(
                "A Linen init must return a mapping of collections that includes 'params', got "
                f"{type(initial).__name__} {keys}."
            )
        variables = {k: v for k, v in initial.items() if k not in ("params", *_DROPPED)}
        return initial["params"], variables

    def axes_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> LogicalAxes:
        return logical_axes(jax.eval_shape(init_boxed, rng, inputs))

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        changeable = _changeable(variables, mutable, train)
        with _logical_rules(inputs):
            result = apply(
                {"params": params, **variables},
                *inputs,
                rngs=rngs_of(rng, streams["apply"]),
                mutable=changeable,
                **_mode(apply, train=train),
            )
        if not changeable:
            return result, {}
        outputs, changed = result
        return outputs, flax.core.unfreeze(changed)

    return ModelFns(init=init_fn, apply=apply_fn, axes=axes_fn)


def logical_axes(
    collections: flax.core.FrozenDict[str, Any] | dict[str, Any],
) -> dict[trees.Name, tuple[Any, ...]]:
    """Reads logical axes from boxed parameters and from collections named '..._axes'."""
    is_named = lambda x: isinstance(getattr(x, "names", None), tuple)  # noqa: E731
    axes = {}
    nodes = trees.named_leaves(flax.core.unfreeze(collections), is_leaf=is_named)
    for (collection, *name), node in nodes.items():
        if is_named(node):
            if collection.endswith(_AXES):  # As `nn.partitioning.param_with_axes` stores them.
                name[-1] = name[-1].removesuffix(_AXES)
            axes[(collection.removesuffix(_AXES), *name)] = tuple(node.names)
    return axes


def _logical_rules(inputs: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """Makes `nn.with_logical_constraint` follow the active layout."""
    layout = layout_lib.active_layout()
    if layout is None:
        return contextlib.nullcontext()
    divides = batches.n_rows(inputs) % layout.n_row_parts == 0
    rules = [rule for rule in layout.all_logical_rules if divides or rule[0] != "batch"]
    return nn.logical_axis_rules(rules)


def rngs_of(rng: jax.Array, names: Sequence[str]) -> dict[str, jax.Array]:
    """Returns a separate key for each rng stream."""
    return {name: jax.random.fold_in(rng, i) for i, name in enumerate(names)}


def _changeable(variables: Variables, mutable: CollectionFilter, train: bool) -> list[str] | bool:
    """Returns the collections that a call may change, or False if there are none."""
    if not train:
        mutable = "carry"
    return [name for name in variables if flax.core.scope.in_filter(mutable, name)] or False


def _mode(method: Callable[..., Any], *, train: bool) -> dict[str, bool]:
    """Returns the call arguments that select training or evaluation, if there are any."""
    module = getattr(method, "__self__", None)
    if not isinstance(module, nn.Module):
        return {}
    arguments = inspect.signature(type(module).__call__).parameters
    return {
        name: value
        for name, value in functions.train_arguments(train).items()
        # Linen refuses an argument that is also set as a field of the module.
        if name in arguments and getattr(module, name, None) is None
    }
