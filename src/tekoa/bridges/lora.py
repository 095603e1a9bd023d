"""Low-rank adaptation (LoRA) of any model: small trained matrices over frozen weights.

The model runs with W + scale * A @ B in place of a weight W. A and B are the parameters. W
is one of the model's variables, so it has no gradient, no optimizer state and no moving
average, and no step changes it.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from tekoa.bridges import any_model
from tekoa.core import messages, rules, trees
from tekoa.core.model import LogicalAxes, ModelFns, Variables, axes_also_in
from tekoa.core.objective import HALVES
from tekoa.core.trees import PyTree
from tekoa.optim.scales.roles import Role
from tekoa.optim.scales.table import ScaleTable

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
    """Creates a model that trains low-rank changes of its weights.

    Args:
        model: A Linen, NNX or Equinox module, a Haiku transformed pair, or `ModelFns`. The
            weights of an NNX or Equinox module are the base; for Linen and Haiku, pass
            trained weights as `base`.
        rank: Columns of A and rows of B.
        where: Which weights to adapt: a pattern searched in their names, such as
            'attention.*kernel$', or a table of pattern to 'adapt', 'train' (the full weight)
            or 'freeze'. The first match wins; weights without a match are frozen. None
            adapts every weight with two or more axes.
        alpha: The scale is alpha / rank, or 1 if None.
        base: Trained parameters to start from, with the structure of the model's own, such
            as `load_checkpoint(path)['model_params']`.
        adapters: Trained adapters to start from: parameters of a model created by `lora`.

    Returns:
        `ModelFns`. Its parameters are the adapters, named after their weights
        ('dense/kernel/lora_a'), and the weights marked 'train'. Its `merge(params, variables)`
        returns the model with plain weights, like `TrainLoop.model`; if the library has no
        model object, a tree of parameters. A weight with more than two axes is split, in
        the order of its axes, into the matrix with the smallest adapters.

    Raises:
        ValueError: If rank, alpha or a pattern is invalid; from `init`, if a pattern matches
            no name, nothing is adapted, or a weight to adapt has fewer than two axes or a
            rank below `rank`.

    >>> model = any_model.as_model_fns({'w': jnp.ones((3, 4))}, lambda p, x: x @ p['w'])
    >>> model = lora(model, rank=1)
    >>> params, variables = model.init(jax.random.key(0), ())
    >>> {name: leaf.shape for name, leaf in trees.flatten_named(params).items()}
    {'w/lora_a': (3, 1), 'w/lora_b': (1, 4)}
    >>> model.merge(params, variables)['w'].shape
    (3, 4)
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a positive integer, got {rank!r}.")
    if alpha is not None and not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha!r}.")
    inner = any_model.as_model_fns(model)
    table = _parse_where(where)
    scale = 1.0 if alpha is None else alpha / rank

    def init_fn(rng: jax.Array, inputs: tuple[Any, ...]) -> tuple[PyTree, Variables]:
        model_rng, adapters_rng = jax.random.split(rng)
        params, variables = inner.init(model_rng, inputs)
        if FROZEN in variables:
            raise ValueError(
                f"The model already has a collection {FROZEN!r}: it cannot be adapted twice."
            )
        params = _replace_values(params, base, "base")
        treatments = _treatments(params, table)
        trained = _trained_params(params, treatments, rank, adapters_rng)
        frozen = trees.map_named(
            lambda name, leaf: None if treatments[name] == "train" else leaf, params
        )
        return _replace_values(trained, adapters, "adapters"), {**variables, FROZEN: frozen}

    def apply_fn(params, variables, inputs, *, rng, train: bool):
        weights, rest = _merge_weights(params, variables, scale)
        return inner.apply(weights, rest, inputs, rng=rng, train=train)

    def merge(params: PyTree, variables: Variables) -> Any:
        weights, rest = _merge_weights(params, variables, scale)
        return weights if inner.merge is None else inner.merge(weights, rest)

    def axes_fn(rng: Any, inputs: tuple[Any, ...]) -> LogicalAxes:
        """Returns the axes of the weights, frozen or not; adapters are small and have none."""
        return axes_also_in(FROZEN, {} if inner.axes is None else inner.axes(rng, inputs))

    def convert(weights: ScaleTable) -> ScaleTable:
        return _adapter_table(weights, table, rank, scale)

    return ModelFns(
        init=init_fn, apply=apply_fn, merge=merge, axes=axes_fn, adapts=(inner, convert)
    )


def _adapter_table(
    weights: ScaleTable, where: Mapping[str, Treatment] | None, rank: int, scale: float
) -> ScaleTable:
    """Returns the scales of the trained parameters from those of the model's weights.

    A has the scale of its initial values, B that at which `scale * A @ B` has the weight's.
    """
    by_name = {row.name: row for row in weights}
    shapes = {name: jax.ShapeDtypeStruct(row.shape, jnp.float32) for name, row in by_name.items()}
    rows = {}
    for name, treatment in _treatments(trees.nest(shapes), where).items():
        row = by_name[name]
        if treatment == "train":
            rows[name] = row
        elif treatment == "adapt":
            n_rows, n_columns = _matrix_shape(name, row.shape, rank)
            eta_a = math.sqrt(2 / n_rows)
            eta_b = row.eta / row.n_branches / (scale * math.sqrt(rank) * eta_a)
            for part, shape, eta, contracted in (
                (A, (n_rows, rank), eta_a, 1),
                (B, (rank, n_columns), eta_b, 0),
            ):
                rows[*name, part] = dataclasses.replace(
                    row,
                    name=(*name, part),
                    shape=shape,
                    eta=eta,
                    eta_by_slice=None,
                    slot_shape=tuple(1 if i == contracted else n for i, n in enumerate(shape)),
                    role=Role(
                        kind="paired",
                        contracted=(contracted,),
                        free=(1 - contracted,),
                        is_output=row.role.is_output,
                    ),
                    reason=f"rank {rank}, for a weight of scale {row.eta:.3g}",
                    n_branches=1,
                )
    names = trees.leaf_names(trees.nest(rows))
    return ScaleTable([rows[name] for name in names], depth=weights.depth)


def _parse_where(where: str | Mapping[str, Treatment] | None) -> dict[str, Treatment] | None:
    if where is None:
        return None
    table: dict[str, Treatment] = {where: "adapt"} if isinstance(where, str) else dict(where)
    for pattern, treatment in table.items():
        if treatment not in get_args(Treatment):
            raise ValueError(
                f"where[{pattern!r}] must be one of {get_args(Treatment)}, got {treatment!r}."
            )
    rules.compile_rules(table)  # Raises if a pattern is not a regular expression.
    return table


def _treatments(params: PyTree, table: Mapping[str, Treatment] | None) -> dict[trees.Name, str]:
    """Returns the treatment of each parameter."""
    leaves = trees.named_leaves(params)
    if table is None:
        treatments = ["adapt" if jnp.ndim(leaf) > 1 else "freeze" for leaf in leaves.values()]
    else:
        if unused := rules.unused(table, leaves):
            raise ValueError(
                f"Pattern {unused[0]!r} of `where` matches no parameter. "
                f"The parameters are: {_list_names(leaves)}."
            )
        treatments = jax.tree.leaves(rules.map_rules({**table, "": "freeze"}, params))
    if "adapt" not in treatments:
        raise ValueError(
            f"There is nothing to adapt: `where` is {table}, and the parameters are: "
            f"{_list_names(leaves)}."
        )
    return dict(zip(leaves, treatments, strict=True))


def _list_names(names: Iterable[trees.Name]) -> str:
    return messages.some_of(["/".join(name) for name in names], limit=12)


def _trained_params(
    params: PyTree, treatments: Mapping[trees.Name, str], rank: int, rng: jax.Array
) -> dict[str, Any]:
    """Returns a random A and a zero B per adapted weight, and the weights with 'train'."""
    trained: dict[trees.Name, Any] = {}
    for i, (name, leaf) in enumerate(trees.named_leaves(params).items()):
        if treatments[name] == "train":
            trained[name] = leaf
        elif treatments[name] == "adapt":
            n_rows, n_columns = _matrix_shape(name, jnp.shape(leaf), rank)
            dtype = trees.wide_dtype(leaf)
            draw = jax.nn.initializers.he_uniform()
            trained[*name, A] = draw(jax.random.fold_in(rng, i), (n_rows, rank), dtype)
            trained[*name, B] = jnp.zeros((rank, n_columns), dtype)
    return trees.nest(trained)


def _matrix_shape(name: trees.Name, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Returns the rows and columns of a weight, split where the adapters are smallest."""
    if len(shape) < 2:
        raise ValueError(
            f"Parameter {'/'.join(name)!r} of shape {shape} has fewer than two axes and cannot be "
            "adapted. Exclude it from `where`, or use 'train' to train the full weight."
        )
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape) - 1, 0, -1)]
    matrix = min(splits, key=sum)
    if rank > min(matrix):
        raise ValueError(
            f"rank={rank} is too large for parameter {'/'.join(name)!r} of shape {shape}: as a "
            f"{matrix[0]} x {matrix[1]} matrix it has at most rank {min(matrix)}. Lower the rank, "
            "or exclude the parameter by `where`."
        )
    return matrix


def _replace_values(params: PyTree, new_values: PyTree, what: str) -> PyTree:
    """Returns `params` with new values by name; unchanged if `new_values` is None."""
    if new_values is None:
        return params
    values = trees.named_leaves(new_values)
    if differing := sorted(values.keys() ^ set(trees.leaf_names(params))):
        raise ValueError(f"`{what}` and the model differ in: {_list_names(differing)}.")

    def replace(name: trees.Name, leaf: Any) -> jax.Array:
        if jnp.shape(values[name]) != jnp.shape(leaf):
            raise ValueError(
                f"Parameter {'/'.join(name)!r} has shape {jnp.shape(values[name])} in `{what}`, "
                f"but {jnp.shape(leaf)} in the model."
            )
        return jnp.asarray(values[name], leaf.dtype)

    return trees.map_named(replace, params)


def _merge_weights(
    params: PyTree, variables: Variables, scale: float
) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the weights that the model runs with, and its other variables."""
    rest = dict(variables)
    frozen = rest.pop(FROZEN)
    trained = trees.named_leaves(params)
    # Mixed precision casts the parameters; the frozen weights then follow the adapters.
    adapters = {leaf.dtype for name, leaf in trained.items() if name[-1] == A}
    half = next((dtype for dtype in HALVES.values() if jnp.dtype(dtype) in adapters), None)

    def weight(name: trees.Name, leaf: Any) -> Any:
        if leaf is None:
            return trained[name]
        dtype = half if half is not None and leaf.dtype == jnp.float32 else leaf.dtype
        if (*name, A) in trained:
            a, b = trained[*name, A], trained[*name, B]
            change = _product(a, b, trees.wide_dtype(leaf))
            leaf = trees.widen(leaf) + scale * change.reshape(leaf.shape)
        return leaf.astype(dtype)

    return trees.map_named(weight, frozen, is_leaf=lambda x: x is None), rest


def _product(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """Returns `a @ b` in a dtype."""
    if jax.default_backend() != "cpu":
        return jnp.matmul(a, b, preferred_element_type=dtype)

    # XLA fuses this product with that of the layer. On CPU, jaxlib 0.10.2 then adds it twice.
    def add(total: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        column, row = pair
        return total + column[:, None] * row, None

    start = jnp.zeros((a.shape[0], b.shape[1]), dtype)
    return jax.lax.scan(add, start, (a.T.astype(dtype), b.astype(dtype)))[0]
