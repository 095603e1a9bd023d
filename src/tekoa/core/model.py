"""The model interface of the engine: two pure functions.

A bridge creates `ModelFns` from a Linen, NNX, Equinox or Haiku model or from plain
functions; everything above the bridges uses only this record.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from tekoa.core import trees
from tekoa.core.trees import PyTree

Variables = Mapping[str, PyTree]
# Logical axes of parameters and variables by name; the first part is the collection.
LogicalAxes = Mapping[trees.Name, Sequence[Any]]

Remat = Literal["dots", "everything"] | Callable[..., Any]

UNTRAINED = "untrained"


class ApplyFn(Protocol):
    """Runs the model on one batch of inputs.

    Returns the outputs and the variables that may have changed. Collections that are not
    returned stay unchanged.
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
        init: `(rng, inputs) -> (params, variables)`, from a key and sample inputs. Variables is a
            mapping of collections; the collection named 'carry' is passed from batch to batch.
        apply: `(params, variables, inputs, rng=, train=) -> (outputs, variables)`.
        merge: `(params, variables) -> the user's own model object`, if there is one.
        axes: `(rng, inputs) -> logical axes by name`, if the model names the axes of its
            arrays. A name begins with 'params' or the collection. Computes no arrays.
        native: `params -> the same values in the library's own kind of tree`, for optimizers that
            were created for such a tree, if it is not `params` itself.
        adapts: `(inner, convert)`, if the parameters are changes of the weights of another model:
            that model, and the function from its table of scales to the table of these.
    """

    init: Callable[[Any, tuple[Any, ...]], tuple[PyTree, Variables]]
    apply: ApplyFn
    merge: Callable[[PyTree, Variables], Any] | None = None
    axes: Callable[[Any, tuple[Any, ...]], LogicalAxes] | None = None
    native: Callable[[PyTree], PyTree] | None = None
    adapts: "tuple[ModelFns, Callable[[Any], Any]] | None" = None


def with_remat(model: ModelFns, remat: Remat) -> ModelFns:
    """Returns a model that computes activations again for its gradient instead of storing them.

    Args:
        model: The model.
        remat: "everything"; "dots", to keep the results of products with weights; or a policy of
            `jax.checkpoint_policies`.

    Raises:
        ValueError: If it is another word.
    """
    policies = {
        "everything": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    if isinstance(remat, str) and remat not in policies:
        raise ValueError(f"remat must be 'dots', 'everything' or a policy, got {remat!r}.")
    policy = policies[remat] if isinstance(remat, str) else remat

    def apply(params: PyTree, variables: Variables, inputs: Any, *, rng: Any, train: bool) -> Any:
        def run(*args: Any) -> Any:
            return model.apply(*args[:3], rng=args[3], train=train)

        return jax.checkpoint(run, policy=policy)(params, variables, inputs, rng)

    return dataclasses.replace(model, apply=apply)


def run_model(
    model: ModelFns,
    params: PyTree,
    variables: Variables,
    inputs: tuple[Any, ...],
    *,
    rng: jax.Array,
    train: bool,
) -> tuple[tuple[Any, ...], dict[str, PyTree]]:
    """Runs a model and checks its results.

    Parameters that are not trained are in the collection `UNTRAINED`; the model gets all of them.

    Returns:
        The outputs as a tuple, and all variables with their previous shapes and dtypes.

    Raises:
        TypeError: If the model does not return `(outputs, changed variables)`.
        ValueError: If a variable is new or has changed its shape.
    """
    params, rest = merge_untrained(params, variables)
    result = model.apply(params, rest, inputs, rng=rng, train=train)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        kind = f"{type(result).__name__} {getattr(result, 'shape', '')}".strip()
        if isinstance(result, tuple):
            kind = f"a tuple of {[type(x).__name__ for x in result]}"
        raise TypeError(
            "The model's apply must return (outputs, variables), where variables is a dict of the "
            f"changed collections, possibly empty; got {kind}."
        )
    outputs, changed = result
    if unknown := sorted(changed.keys() - rest.keys()):
        raise ValueError(
            f"The model's apply returned the collections {unknown}, which its init did not create "
            f"(it created {sorted(rest)}). Create them in init, with their final shapes."
        )
    changed = {name: cast_like(variables[name], tree, name) for name, tree in changed.items()}
    return outputs if isinstance(outputs, tuple) else (outputs,), {**variables, **changed}


def merge_untrained(params: PyTree, variables: Variables) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns all parameters, trained or not, and the other variables.

    >>> merge_untrained({'w': 1, 'b': None}, {'untrained': {'w': None, 'b': 2}, 'stats': {}})
    ({'b': 2, 'w': 1}, {'stats': {}})
    """
    rest = dict(variables)
    untrained = rest.pop(UNTRAINED, None)
    if untrained is None:
        return params, rest
    return jax.tree.map(
        lambda trained, fixed: fixed if trained is None else trained,
        params,
        untrained,
        is_leaf=lambda x: x is None,
    ), rest


def axes_also_in(collection: str, axes: LogicalAxes) -> LogicalAxes:
    """Returns logical axes with those of the parameters for a collection that holds some of them.

    >>> axes_also_in('frozen', {('params', 'w'): ('embed',)})
    {('params', 'w'): ('embed',), ('frozen', 'w'): ('embed',)}
    """
    of_params = {name[1:]: value for name, value in axes.items() if name[0] == "params"}
    return {**axes, **{(collection, *name): value for name, value in of_params.items()}}


def cast_like(old: PyTree, new: PyTree, what: str) -> PyTree:
    """Casts the new values to the dtypes of the old ones, so that a state keeps its types.

    Args:
        old: The tree before a step.
        new: The tree after it.
        what: The name of the tree, for messages.

    Raises:
        ValueError: If leaves were added or removed, or shapes have changed.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        a, b = ({"/".join(name) for name in trees.leaf_names(tree)} for tree in (old, new))
        raise ValueError(
            f"A step must not change the structure of {what!r}: removed {sorted(a - b)}, added "
            f"{sorted(b - a)}."
        )

    def cast(name: trees.Name, a: Any, b: Any) -> jax.Array:
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(
                f"{'/'.join((what, *name))!r} changed its shape in a step, from {jnp.shape(a)} to "
                f"{jnp.shape(b)}."
            )
        return jnp.asarray(b, a.dtype)

    return trees.map_named(cast, old, new)
