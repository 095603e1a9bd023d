"""Low-rank adaptation of any model: small learned matrices over frozen weights.

A weight W becomes W + scale * A @ B where the model is run. A and B are the parameters;
W lives among the model's other variables, so it has no gradient, no optimizer state and
no average, and no step changes a bit of it.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from tekoa.bridges import detect
from tekoa.core import rules, trees
from tekoa.core.model import ModelFns, Variables
from tekoa.core.trees import PyTree

Treatment = Literal["adapt", "train", "freeze"]

FROZEN = "frozen"
A, B = "lora_a", "lora_b"


def lora(
    model: Any,
    rank: int = 2,
    *,
    where: str | Mapping[str, Treatment] | None = None,
    alpha: float | None = None,
    base: PyTree = None,
    adapters: PyTree = None,
) -> ModelFns:
    """Makes a model that learns low-rank changes of its weights and nothing else.

    Args:
        model: All that `as_model_fns` takes alone: a Linen, NNX or Equinox module, Haiku's
            pair, or `ModelFns`. Its weights are the base; those of a Linen or Haiku model
            are in `base`.
        rank: Columns of A and rows of B.
        where: Which weights: a pattern that is searched in their names ('attention.*kernel$'),
            or a table of pattern to 'adapt', 'train' (as it is, in full) or 'freeze', the
            first found wins and what none is found in is frozen. None adapts every weight
            of two axes or more.
        alpha: The scale is alpha / rank; None: 1.
        base: Trained parameters to start from, in the form of the model's own, such as
            `load_checkpoint(path)['model_params']`.
        adapters: Trained adapters to start from: the parameters of a model made here.

    Returns:
        `ModelFns`. Its parameters are the adapters, named after their weights
        ('dense/kernel/lora_a'), and what 'train' names; its `merge(params, variables)`
        gives the model with plain weights (a tree of parameters where the library has no
        model object), as `TrainLoop.model` does. A weight of more than two axes is taken
        as the matrix that needs the smallest adapters. The axes keep their order.

    Raises:
        ValueError: If rank or alpha is out of range or a pattern is wrong; from `init`, if a
            pattern is found in no name, nothing is adapted, or a weight has fewer than two
            axes or no room for the rank.

    >>> model = lora(detect.as_model_fns({'w': jnp.ones((3, 4))}, lambda p, x: x @ p['w']), rank=1)
    >>> params, variables = model.init(jax.random.key(0), ())
    >>> {name: leaf.shape for name, leaf in trees.flatten_named(params).items()}
    {'w/lora_a': (3, 1), 'w/lora_b': (1, 4)}
    >>> model.merge(params, variables)['w'].shape
    (3, 4)
    """
    inner = detect.as_model_fns(model)
    table = _table(where)
    scale = _scale(rank, alpha)

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        model_rng, adapters_rng = jax.random.split(rng)
        params, variables = inner.init(model_rng, inputs)
        if FROZEN in variables:
            raise ValueError(f"The model has a collection {FROZEN!r} already: is it adapted twice?")
        params = _started(params, base, "base")
        treated = _treatments(params, table)
        learned = _learned(params, treated, rank, adapters_rng)
        frozen = trees.map_named(
            lambda name, leaf: None if treated[name] == "train" else leaf, params
        )
        return _started(learned, adapters, "adapters"), {**variables, FROZEN: frozen}

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        whole, rest = _merged(params, variables, scale)
        return inner.apply(whole, rest, inputs, rng=rng, train=train)

    def merge(params: PyTree, variables: Variables) -> Any:
        whole, rest = _merged(params, variables, scale)
        return whole if inner.merge is None else inner.merge(whole, rest)

    def axes_fn(rng: Any, inputs: tuple[Any, ...]) -> dict[trees.Name, tuple[Any, ...]]:
        """Weights keep their axes where they are now; adapters are small and have none."""
        found = {} if inner.axes is None else dict(inner.axes(rng, inputs))
        own = {name[1:]: axes for name, axes in found.items() if name[0] == "params"}
        return {**found, **{(FROZEN, *name): axes for name, axes in own.items()}}

    return ModelFns(init=init_fn, apply=apply_fn, merge=merge, axes=axes_fn)


def _scale(rank: int, alpha: float | None) -> float:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a whole number of 1 or more, got {rank!r}.")
    if alpha is not None and not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha!r}.")
    return 1.0 if alpha is None else alpha / rank


def _table(where: str | Mapping[str, Treatment] | None) -> dict[str, Treatment] | None:
    if where is None:
        return None
    table: dict[str, Treatment] = {where: "adapt"} if isinstance(where, str) else dict(where)
    for pattern, treatment in table.items():
        if treatment not in get_args(Treatment):
            raise ValueError(
                f"where[{pattern!r}] must be one of {get_args(Treatment)}, got {treatment!r}."
            )
    rules.map_rules({**table, "": "freeze"}, {})  # Says which pattern cannot be read.
    return table


def _treatments(params: PyTree, table: Mapping[str, Treatment] | None) -> dict[trees.Name, str]:
    """What becomes of each leaf."""
    names = trees.leaf_names(params)
    leaves = jax.tree.leaves(params)
    if table is None:
        found = ["adapt" if jnp.ndim(leaf) > 1 else "freeze" for leaf in leaves]
    else:
        unused = [p for p in table if not any(re.search(p, "/".join(name)) for name in names)]
        if unused:
            raise ValueError(
                f"Pattern {unused[0]!r} of `where` is found in no name of a parameter. "
                f"There are: {_listed(names)}."
            )
        found = jax.tree.leaves(rules.map_rules({**table, "": "freeze"}, params))
    if "adapt" not in found:
        raise ValueError(
            f"Nothing is left to adapt: `where` is {table}, the model has {_listed(names)}."
        )
    return dict(zip(names, found, strict=True))


def _listed(names: Sequence[trees.Name], limit: int = 12) -> str:
    shown = ", ".join("/".join(name) for name in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def _learned(
    params: PyTree, treated: Mapping[trees.Name, str], rank: int, rng: jax.Array
) -> dict[str, Any]:
    """The parameters: a random A and a B of zeros per weight, and what is trained in full."""
    learned: dict[str, Any] = {}
    for i, (name, leaf) in enumerate(zip(treated, jax.tree.leaves(params), strict=True)):
        if treated[name] == "train":
            _put(learned, name, leaf)
        elif treated[name] == "adapt":
            n_rows, n_columns = _matrix_shape(name, jnp.shape(leaf), rank)
            dtype = trees.wide_dtype(leaf)
            draw = jax.nn.initializers.he_uniform()
            a = draw(jax.random.fold_in(rng, i), (n_rows, rank), dtype)
            _put(learned, name, {A: a, B: jnp.zeros((rank, n_columns), dtype)})
    return learned


def _matrix_shape(name: trees.Name, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """A weight as rows and columns, cut where the adapters are smallest."""
    what = f"Parameter {'/'.join(name)!r} of shape {shape}"
    if len(shape) < 2:
        raise ValueError(
            f"{what} has fewer than two axes and cannot be adapted. Leave it out of `where`, or "
            "say 'train' to learn it in full."
        )
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape) - 1, 0, -1)]
    matrix = min(cuts, key=sum)
    if rank > min(matrix):
        raise ValueError(
            f"rank={rank} is too much for {what[0].lower()}{what[1:]}: taken as a {matrix[0]} x "
            f"{matrix[1]} matrix, its rank is {min(matrix)} at most. Lower the rank, or leave it "
            "out by `where`."
        )
    return matrix


def _started(fresh: PyTree, given: PyTree, what: str) -> PyTree:
    """Takes given values by name, in place of fresh ones."""
    if given is None:
        return fresh
    values = dict(zip(trees.leaf_names(given), jax.tree.leaves(given), strict=True))
    if differing := sorted(values.keys() ^ set(trees.leaf_names(fresh))):
        raise ValueError(f"`{what}` and the model differ in the parameters {_listed(differing)}.")

    def take(name: trees.Name, leaf: Any) -> jax.Array:
        if jnp.shape(values[name]) != jnp.shape(leaf):
            raise ValueError(
                f"`{what}` has shape {jnp.shape(values[name])} for {'/'.join(name)!r}, the model "
                f"{jnp.shape(leaf)}."
            )
        return jnp.asarray(values[name], leaf.dtype)

    return trees.map_named(take, fresh)


def _merged(params: PyTree, variables: Variables, scale: float) -> tuple[PyTree, dict[str, PyTree]]:
    """The weights that the model runs with, and its own variables."""
    rest = dict(variables)
    frozen = rest.pop(FROZEN)
    # Adapters that come as bfloat16 tell that the model is to run in it.
    is_lowered = any(leaf.dtype == jnp.bfloat16 for leaf in _factors(params))

    def whole(name: trees.Name, leaf: Any) -> Any:
        own = _at(params, name)
        if leaf is None:
            return own
        lowers = is_lowered and leaf.dtype == jnp.float32
        dtype = jnp.bfloat16 if lowers else leaf.dtype
        if own is not None:
            change = jnp.matmul(own[A], own[B], preferred_element_type=trees.wide_dtype(leaf))
            leaf = trees.widen(leaf) + scale * change.reshape(leaf.shape)
        return leaf.astype(dtype)

    return trees.map_named(whole, frozen, is_leaf=_is_none), rest


def _is_none(x: Any) -> bool:
    return x is None


def _factors(tree: Any) -> Iterator[jax.Array]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == A:
                yield value
            else:
                yield from _factors(value)


def _put(nested: dict[str, Any], name: trees.Name, value: Any) -> None:
    *outer, last = name
    for part in outer:
        nested = nested.setdefault(part, {})
    nested[last] = value


def _at(nested: Any, name: trees.Name) -> Any:
    for part in name:
        if not isinstance(nested, dict) or part not in nested:
            return None
        nested = nested[part]
    return nested
