"""Optimizers of other kinds as optax transformations over plain trees of parameters."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import optax

from tekoa import hosts
from tekoa.core import trees
from tekoa.core.trees import PyTree
from tekoa.optim import groups, named
from tekoa.optim.scales.table import ScaleTable
from tekoa.optim.triples import convert


def as_transformation(optimizer: Any) -> optax.GradientTransformation:
    """Returns an optimizer as an optax transformation.

    Args:
        optimizer: An optax transformation; its name, which a training loop resolves; an (init,
            update, get_params) triple; or an `nnx.Optimizer`, of which the transformation is
            used and not the state.

    Raises:
        TypeError: If it is anything else.
        ValueError: If there is no optimizer with this name.
    """
    if isinstance(optimizer, str):
        return named.NamedOptimizer(optimizer)
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return optimizer
    if is_nnx_optimizer(optimizer):
        return as_transformation(optimizer.tx)
    if isinstance(optimizer, tuple) and len(optimizer) == 3 and all(map(callable, optimizer)):
        return convert.from_triple(cast(Any, optimizer))
    hint = ""
    if isinstance(optimizer, type) or callable(optimizer):
        hint = f" Call it: {getattr(optimizer, '__name__', 'optimizer')}(...)."
    raise TypeError(
        "optimizer must be an optax transformation such as optax.adam(1e-3), a name such as "
        "'auto', an (init, update, get_params) triple, or an nnx.Optimizer; got "
        f"{optimizer!r}.{hint}"
    )


def is_nnx_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer is an `nnx.Optimizer`, which also filters what is trained."""
    return isinstance(optimizer, getattr(sys.modules.get("flax.nnx"), "Optimizer", ()))


def accepting_native(
    tx: optax.GradientTransformation, native: Callable[[PyTree], PyTree] | None
) -> optax.GradientTransformation:
    """Returns a transformation that works on plain trees even if it needs a library's own.

    `optax.partition` and `optax.masked` may hold a tree of labels with the structure of an
    `nnx.State` or of a module. If a transformation refuses plain trees, it gets the library's.

    Args:
        tx: The transformation.
        native: See `ModelFns.native`.
    """
    if native is None:
        return tx
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> Any:
        return _either(lambda: inner.init(params), lambda: inner.init(native(params)))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        def update_native() -> tuple[PyTree, Any]:
            extra = dict(extra_args)
            if "grad" in extra:
                extra["grad"] = native(extra["grad"])
            if "value_fn" in extra:
                extra["value_fn"] = lambda tree: extra_args["value_fn"](_like(updates, tree))
            new, new_state = inner.update(native(updates), state, native(params), **extra)
            return _like(updates, new), new_state

        return _either(lambda: inner.update(updates, state, params, **extra_args), update_native)

    return optax.GradientTransformationExtraArgs(init, update)


def _either(plain: Callable[[], Any], native: Callable[[], Any]) -> Any:
    try:
        return plain()
    except (TypeError, ValueError) as error:
        # If neither works, the kind of the tree is not the reason.
        try:
            return native()
        except (TypeError, ValueError):
            raise error from None


def _like(tree: PyTree, values: PyTree) -> PyTree:
    """Returns the values of a library's own tree by name in the structure of a plain one."""
    leaves = trees.named_leaves(values)
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in trees.leaf_names(tree)]
    )


def resolve_named(
    optimizer: Any,
    find_table: Callable[[], ScaleTable],
    n_steps: int | None,
    saved: Mapping[str, Any] | None,
) -> str:
    """Chooses an optimizer that is named, with the same scales on every process.

    Returns:
        One line about the choice; nothing if the optimizer is not a name.
    """
    chosen = groups.by_name(optimizer)
    if chosen is None:
        return ""

    def find_common_table() -> ScaleTable:
        table = find_table()
        # Every process has other rows, but all must use the same scales.
        return table.with_etas(hosts.current().broadcast("scales", table.etas))

    return chosen.resolve(find_common_table, n_steps=n_steps, saved=saved)


def facts_of(optimizer: Any) -> dict[str, Any]:
    """Returns what a resumed run needs to choose the same optimizer; empty if it has no name."""
    chosen = groups.by_name(optimizer)
    return {} if chosen is None else {"optimizer": chosen.facts}
