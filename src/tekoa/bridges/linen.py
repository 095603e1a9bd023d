"""Flax Linen models as pure functions: collections, rngs, train and eval mode."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.core
import jax
from flax import linen as nn

from tekoa.bridges import functions
from tekoa.core import batch as batches
from tekoa.core import sharding, trees
from tekoa.core.model import ModelFns, Variables
from tekoa.core.trees import PyTree

Collections = Mapping[str, Sequence[str]]

_NOT_KEPT = ("intermediates",)
_AXES = "_axes"


def model_fns(
    init: Any,
    apply: Callable[..., Any] | None = None,
    *,
    collections: Collections | None = None,
    mutable: bool | Sequence[str] = True,
) -> ModelFns:
    """Makes `ModelFns` of a Linen module, or of its `init` and `apply`.

    Args:
        init: A module, or `module.init`.
        apply: `module.apply`; that of the module by default.
        collections: Names of the rng streams at "init" and at "apply".
        mutable: Which collections training may change: all that the model has, none, or
            those named. Evaluation changes the 'carry' only.

    Returns:
        The model's functions. A call argument named train, training, is_training or
        deterministic is set by the mode.
    """
    module = init if isinstance(init, nn.Module) else None
    if module is not None:
        init, apply = module.init, apply or module.apply
    if apply is None:
        raise TypeError("A Linen model needs apply as well as init: pass apply=model.apply.")
    streams = {"init": ("params", "dropout"), "apply": ("dropout",), **(collections or {})}

    @jax.jit  # Run op by op, each operation would be compiled by itself.
    def initialised(rng: jax.Array, inputs: tuple[Any, ...]) -> Any:
        found = init(rngs_of(rng, streams["init"]), *inputs, **_mode(init, train=False))
        return nn.meta.unbox(flax.core.unfreeze(found))

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        found = initialised(rng, inputs)
        if not isinstance(found, Mapping) or "params" not in found:
            raise TypeError(
                "A Linen init must give a mapping of collections with 'params' among them, "
                f"got {type(found).__name__} {sorted(found) if isinstance(found, Mapping) else ''}."
            )
        variables = {k: v for k, v in found.items() if k not in ("params", *_NOT_KEPT)}
        return found["params"], variables

    def axes_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> dict[trees.Name, tuple[Any, ...]]:
        def boxed(rng: jax.Array, inputs: tuple[Any, ...]) -> Any:
            return init(rngs_of(rng, streams["init"]), *inputs, **_mode(init, train=False))

        return logical_axes(jax.eval_shape(boxed, rng, inputs))

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        may_change = _may_change(variables, mutable, train)
        with _logical_rules(inputs):
            result = apply(
                {"params": params, **variables},
                *inputs,
                rngs=rngs_of(rng, streams["apply"]),
                mutable=may_change,
                **_mode(apply, train=train),
            )
        if not may_change:
            return result, {}
        outputs, changed = result
        return outputs, flax.core.unfreeze(changed)

    return ModelFns(init=init_fn, apply=apply_fn, axes=axes_fn)


def logical_axes(
    found: flax.core.FrozenDict[str, Any] | dict[str, Any],
) -> dict[trees.Name, tuple[Any, ...]]:
    """Reads the boxes that parameters stand in, and the collections made for axes alone."""
    is_named = lambda x: isinstance(getattr(x, "names", None), tuple)  # noqa: E731
    axes = {}
    for name, node in trees.flatten_named(
        flax.core.unfreeze(found), sep="\0", is_leaf=is_named
    ).items():
        if not is_named(node):
            continue
        collection, *parts = name.split("\0")
        if collection.endswith(_AXES):  # As `nn.partitioning.param_with_axes` stores them.
            collection = collection.removesuffix(_AXES)
            parts[-1] = parts[-1].removesuffix(_AXES)
        axes[(collection, *parts)] = tuple(node.names)
    return axes


@contextlib.contextmanager
def _logical_rules(inputs: tuple[Any, ...]) -> Iterator[None]:
    """Lets `nn.with_logical_constraint` follow the layout that is in force."""
    layout = sharding.active_layout()
    if layout is None:
        yield
        return
    divides = batches.n_rows(inputs) % layout.n_row_parts == 0
    rules = [rule for rule in layout.all_logical_rules if divides or rule[0] != "batch"]
    with nn.logical_axis_rules(rules):
        yield


def rngs_of(rng: jax.Array, names: Sequence[str]) -> dict[str, jax.Array]:
    """Gives each rng stream a key of its own."""
    return {name: jax.random.fold_in(rng, i) for i, name in enumerate(names)}


def _may_change(
    variables: Variables, mutable: bool | Sequence[str], train: bool
) -> list[str] | bool:
    if not train:
        names = [name for name in variables if name == "carry"]
    elif isinstance(mutable, bool):
        names = list(variables) if mutable else []
    else:
        names = [name for name in variables if name in mutable]
    return names or False


def _mode(method: Callable[..., Any], *, train: bool) -> dict[str, bool]:
    """The call argument that tells training from evaluation, where the module has one."""
    module = getattr(method, "__self__", None)
    if not isinstance(module, nn.Module):
        return {}
    arguments = inspect.signature(type(module).__call__).parameters
    return {
        word: answer
        for word, answer in functions.train_words(train).items()
        # A module that holds the setting itself must not be told twice.
        if word in arguments and getattr(module, word, None) is None
    }
