"""Layout: where everything that training holds lives on a mesh of devices.

One record says how parameters, optimizer state, batches and activations are split; from it
follows the sharding of every array of a `TrainState`.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tekoa.core import sharding_mesh, sharding_specs, trees
from tekoa.core.sharding_mesh import LayoutError
from tekoa.core.sharding_specs import LogicalRules, Rules
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree

# Logical axes of parameters and variables by name; the first part is the collection.
LogicalAxes = Mapping[trees.Name, Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is laid out on devices.

    Attributes:
        mesh: Made by `make_mesh`, or any mesh whose axes are of type Auto.
        rules: Pattern over names of parameters to how they are split: a tuple with one mesh
            axis, several, or None per dimension; or the name of one axis, over which the
            largest dimension that divides is split. That name alone is a rule for all.
        logical_axis_rules: Logical axis to mesh axis, for models that name their axes.
        optimizer_rules: The same as `rules`, over the names of the optimizer's state. Without
            a rule a slot is split as its parameter is; what cannot be split stays whole.
        batch_axes: Mesh axes over which the rows of a batch are split; `data` and `fsdp` by
            default.

    Raises:
        LayoutError: If a rule names an axis that the mesh does not have.

    >>> layout = Layout(mesh=jax.sharding.AbstractMesh((8,), ('data',)), optimizer_rules='data')
    >>> layout.n_row_parts
    8
    """

    mesh: sharding_mesh.AnyMesh
    rules: Rules | str = dataclasses.field(default_factory=dict)
    logical_axis_rules: LogicalRules = ()
    optimizer_rules: Rules | str = dataclasses.field(default_factory=dict)
    batch_axes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        sizes = self.mesh.shape
        logical = {name: (entry,) for name, entry in self.logical_axis_rules}
        tables = {
            "rules": _table(self.rules),
            "optimizer_rules": _table(self.optimizer_rules),
            "logical_axis_rules": logical,
            "batch_axes": {"rows": self.row_axes},
        }
        for name, table in tables.items():
            sharding_specs.check_rules(table, sizes, name)
        if not self.row_axes:
            raise LayoutError(
                f"Which axes split the rows of a batch? The mesh has {', '.join(sizes)}: give "
                "batch_axes=, or name an axis 'data'."
            )

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the rows of a batch are split."""
        if self.batch_axes is not None:
            return tuple(self.batch_axes)
        return tuple(axis for axis in ("data", "fsdp") if axis in self.mesh.shape)

    @property
    def n_row_parts(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    @property
    def row_spec(self) -> jax.P:
        """The spec of arrays whose first axis is the rows of a batch."""
        return jax.P(self.row_axes)

    @property
    def all_logical_rules(self) -> LogicalRules:
        """The logical rules; rows of activations ("batch") go as those of batches do."""
        given = tuple(self.logical_axis_rules)
        if any(name == "batch" for name, _ in given):
            return given
        # First, or another axis of an activation might take theirs.
        return (("batch", self.row_axes), *given)

    def __str__(self) -> str:
        return sharding_mesh.describe(sharding_mesh.sizes_of(self.mesh))

    def tree_specs(self, tree: PyTree, axes: LogicalAxes, collection: str = "params") -> PyTree:
        """Gives the spec of every array of parameters or of other variables.

        Args:
            tree: Arrays or shapes.
            axes: Logical axes by name.
            collection: What the names in `axes` begin with.
        """
        own = {name[1:]: value for name, value in axes.items() if name[0] == collection}
        found = sharding_specs.named_specs(
            _shapes(tree),
            self.mesh.shape,
            table=_table(self.rules),
            logical=own,
            logical_rules=self.all_logical_rules,
        )
        return trees.map_named(lambda name, _: found[name], tree)

    def state_specs(self, state: TrainState, axes: LogicalAxes) -> TrainState:
        """Gives the spec of every array of a state.

        Args:
            state: The state, or its shapes.
            axes: Logical axes of parameters and variables.

        Raises:
            LayoutError: If a rule does not fit an array that it matches.
        """
        params = self.tree_specs(state.params, axes)
        slots = sharding_specs.slot_specs(
            _shapes(state.opt_state),
            _shapes(state.params),
            dict(zip(trees.leaf_names(state.params), jax.tree.leaves(params), strict=True)),
            self.mesh.shape,
            table=_table(self.optimizer_rules),
        )
        sizes = self.mesh.shape
        return state.replace(
            step=jax.P(),
            params=params,
            variables={
                name: self.tree_specs(tree, axes, name) for name, tree in state.variables.items()
            },
            opt_state=trees.map_named(lambda name, _: slots[name], state.opt_state),
            average=None if state.average is None else params,
            carry=jax.tree.map(
                lambda x: sharding_specs.fitting(self.row_spec, x.shape, sizes), state.carry
            ),
            rng=jax.P(),
            sums=_whole(state.sums),
            health=_whole(state.health),
        )

    def shardings(self, specs: PyTree) -> PyTree:
        """Gives the shardings of specs on this mesh."""
        return jax.tree.map(lambda spec: jax.NamedSharding(self.mesh, spec), specs)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Lets models that are traced inside put their activations where the layout says."""
        mesh = self.mesh
        abstract = mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh
        token = _active.set(self)
        try:
            with jax.sharding.use_abstract_mesh(abstract):
                yield
        finally:
            _active.reset(token)


_active: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


def active_layout() -> Layout | None:
    """The layout that the code being traced runs under, if there is one."""
    return _active.get()


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Splits an activation as the layout says for its logical axes, where there is a layout.

    To be called in a model of any library. What does not divide stays whole.

    Args:
        x: The activation.
        *axes: Its logical axes, one per dimension; None: not split. "batch" is the rows.

    >>> constrain(np.ones((4, 2)), 'batch', 'embed').shape
    (4, 2)
    """
    layout = _active.get()
    if layout is None:
        return x
    sizes = layout.mesh.shape
    wanted = sharding_specs.from_logical(axes, layout.all_logical_rules, sizes)
    spec = sharding_specs.fitting(wanted, x.shape, sizes)
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(layout.mesh, spec))


def local_rows(layout: Layout, n_rows: int) -> slice:
    """The rows of a batch that this process has to give, of all `n_rows`.

    Processes that compute the same rows, each a part of the layers, give the same ones.

    Raises:
        LayoutError: If the rows do not divide, or are not one run of rows: then the devices of
            the mesh are not in the order of the processes.
    """
    if n_rows % layout.n_row_parts:
        raise LayoutError(
            f"A batch of {n_rows} rows does not divide among the {layout.n_row_parts} parts of "
            f"the mesh {layout}. Choose a batch size that divides."
        )
    sharding = jax.NamedSharding(layout.mesh, layout.row_spec)
    parts = sharding.addressable_devices_indices_map((n_rows,)).values()
    found = sorted({part[0].indices(n_rows)[:2] for part in parts if part is not None})
    for (_, stop), (start, _) in itertools.pairwise(found):
        if stop != start:
            raise LayoutError(f"The rows {found} of this process do not follow one another.")
    return slice(found[0][0], found[-1][1])


def _shapes(tree: PyTree) -> dict[trees.Name, tuple[int, ...]]:
    leaves = jax.tree.leaves(tree)
    return {
        name: tuple(np.shape(x)) for name, x in zip(trees.leaf_names(tree), leaves, strict=True)
    }


def _whole(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda _: jax.P(), tree)


def _table(rules: Rules | str) -> Rules:
    return {".*": rules} if isinstance(rules, str) else rules
