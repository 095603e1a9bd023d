"""What the engine needs to know of a model: two pure functions.

A bridge makes `ModelFns` from a Linen, NNX, Equinox or Haiku model or from plain
functions; everything above the bridges speaks only of this record.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tekoa.core import trees
from tekoa.core.trees import PyTree

Variables = Mapping[str, PyTree]


class InitFn(Protocol):
    """Makes parameters and the other variables from a key and sample inputs."""

    def __call__(self, rng: Any, inputs: tuple[Any, ...], /) -> tuple[PyTree, Variables]: ...


class ApplyFn(Protocol):
    """Runs the model on one batch of inputs.

    Returns the outputs and the variables that changed or may have changed; what it does
    not return stays as it was.
    """

    def __call__(
        self,
        params: PyTree,
        variables: Variables,
        inputs: tuple[Any, ...],
        /,
        *,
        rng: Any,
        train: bool,
    ) -> tuple[Any, Variables]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFns:
    """A model as pure functions.

    Attributes:
        init: `(rng, inputs) -> (params, variables)`. Variables is a mapping of
            collections; the collection named 'carry' is kept from batch to batch.
        apply: `(params, variables, inputs, rng=, train=) -> (outputs, variables)`.
        merge: `(params, variables) -> the user's own model object`, where there is one.
        axes: `(rng, inputs) -> logical axes by name`, where the model names axes of its
            arrays; a name begins with 'params' or the collection. It computes nothing.
    """

    init: InitFn
    apply: ApplyFn
    merge: Callable[[PyTree, Variables], Any] | None = None
    axes: Callable[[Any, tuple[Any, ...]], Mapping[trees.Name, tuple[Any, ...]]] | None = None


def run_model(
    model: ModelFns,
    params: PyTree,
    variables: Variables,
    inputs: tuple[Any, ...],
    *,
    rng: jax.Array,
    train: bool,
) -> tuple[tuple[Any, ...], dict[str, PyTree]]:
    """Runs a model, whoever wrote it, and holds it to its contract.

    Returns:
        The outputs as a tuple, and all variables in the form they had before.

    Raises:
        TypeError: If the model gives anything but `(outputs, changed variables)`.
        ValueError: If a variable is new, or has another shape than before.
    """
    given = model.apply(params, variables, inputs, rng=rng, train=train)
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
        raise TypeError(
            "The model's apply must give (outputs, variables), with variables a dict of the "
            f"collections that changed, maybe empty; got {_seen(given)}."
        )
    outputs, changed = given
    if unknown := sorted(changed.keys() - variables.keys()):
        raise ValueError(
            f"The model's apply gave the collections {unknown}, which its init did not; known are "
            f"{sorted(variables)}. Make them in init, with the shapes they will have."
        )
    kept = {name: keep_form(variables[name], tree, name) for name, tree in changed.items()}
    return outputs if isinstance(outputs, tuple) else (outputs,), {**variables, **kept}


def keep_form(old: PyTree, new: PyTree, what: str) -> PyTree:
    """Gives the new values the old ones' dtypes, so that a state keeps its form.

    Args:
        old: The tree before a step.
        new: The tree after it.
        what: The name of the tree, for messages.

    Raises:
        ValueError: If leaves came or went, or have other shapes.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        names = [{"/".join(name) for name in trees.leaf_names(tree)} for tree in (old, new)]
        raise ValueError(
            f"A step must not change the structure of {what!r}: "
            f"gone are {sorted(names[0] - names[1])}, new are {sorted(names[1] - names[0])}."
        )

    def keep(name: trees.Name, a: Any, b: Any) -> jax.Array:
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(
                f"{'/'.join((what, *name))!r} changed its shape in a step, from {jnp.shape(a)} to "
                f"{jnp.shape(b)}."
            )
        return jnp.asarray(b, a.dtype)

    return trees.map_named(keep, old, new)


def _seen(given: Any) -> str:
    if isinstance(given, tuple):
        return f"a tuple of {[type(x).__name__ for x in given]}"
    return f"{type(given).__name__} {getattr(given, 'shape', '')}".strip()
