"""Layout: how a run is split over a mesh of devices.

One record defines how parameters, optimizer state, batches and activations are split; it
determines the sharding of every array of a `TrainState`.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from tekoa.core import trees
from tekoa.core.model import LogicalAxes
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.sharding import mesh as mesh_lib
from tekoa.sharding import specs as specs_lib
from tekoa.sharding.mesh import LayoutError
from tekoa.sharding.specs import LogicalRules, Rules


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is split over devices.

    Attributes:
        mesh: A mesh from `make_mesh`, or any other, with axes of type Auto or Explicit.
        rules: Pattern over parameter names to a rule. A rule is a tuple with one entry per
            dimension (a mesh axis, a tuple of axes, or None), or the name of one axis, over
            which the largest divisible dimension, if there is one, is split. A name instead of
            the table is a rule for all parameters.
        logical_axis_rules: Logical axis to mesh axis, for models that name their axes.
        optimizer_rules: Like `rules`, for the names of the optimizer's state. Without a rule a
            slot is split like its parameter; arrays that cannot be split are replicated.
        batch_axes: Mesh axes over which the rows of a batch are split; by default `data` and
            `fsdp`.

    Raises:
        LayoutError: If a rule names an axis that the mesh does not have.

    >>> layout = Layout(mesh=jax.sharding.AbstractMesh((8,), ('data',)), optimizer_rules='data')
    >>> layout.n_row_parts
    8
    """

    mesh: mesh_lib.AnyMesh
    _: dataclasses.KW_ONLY
    rules: Rules | str | None = None
    logical_axis_rules: LogicalRules = ()
    optimizer_rules: Rules | str | None = None
    batch_axes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        sizes = self.mesh.shape
        tables = {
            "rules": _table(self.rules),
            "optimizer_rules": _table(self.optimizer_rules),
            "logical_axis_rules": {name: (entry,) for name, entry in self.logical_axis_rules},
            "batch_axes": {"rows": self.row_axes},
        }
        for name, table in tables.items():
            specs_lib.check_rules(table, sizes, name)
        if not self.row_axes:
            raise LayoutError(
                "No mesh axis splits the rows of a batch. Set batch_axes= to some of the mesh's "
                f"axes {', '.join(map(repr, sizes))}, or name an axis 'data'."
            )

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the rows of a batch are split."""
        if self.batch_axes is not None:
            return tuple(self.batch_axes)
        return tuple(axis for axis in ("data", "fsdp") if axis in self.mesh.shape)

    @property
    def n_row_parts(self) -> int:
        """Number of parts into which the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    @property
    def row_spec(self) -> jax.P:
        """The spec of arrays whose first axis is the rows of a batch."""
        return jax.P(self.row_axes)

    @property
    def all_logical_rules(self) -> LogicalRules:
        """The logical rules, with one for "batch", the rows of activations."""
        rules = tuple(self.logical_axis_rules)
        if any(name == "batch" for name, _ in rules):
            return rules
        # First, so that no other axis of an activation uses these mesh axes.
        return (("batch", self.row_axes), *rules)

    def __str__(self) -> str:
        return mesh_lib.describe(mesh_lib.sizes_of(self.mesh))

    def tree_specs(self, tree: PyTree, axes: LogicalAxes, collection: str = "params") -> PyTree:
        """Returns the spec of every array of one collection, such as the parameters.

        Args:
            tree: Arrays or shapes.
            axes: Logical axes by name.
            collection: The collection, which is the first part of the names in `axes`.
        """
        specs = specs_lib.named_specs(
            _shapes(tree),
            self.mesh.shape,
            table=_table(self.rules),
            logical={name[1:]: value for name, value in axes.items() if name[0] == collection},
            logical_rules=self.all_logical_rules,
        )
        return trees.map_named(lambda name, _: specs[name], tree)

    def state_specs(self, state: TrainState, axes: LogicalAxes) -> TrainState:
        """Returns the spec of every array of a state.

        Args:
            state: The state, or its shapes.
            axes: Logical axes of parameters and variables.

        Raises:
            LayoutError: If a rule does not fit an array that it matches.
        """
        params = self.tree_specs(state.params, axes)
        slots = specs_lib.slot_specs(
            _shapes(state.opt_state),
            _shapes(state.params),
            trees.named_leaves(params),
            self.mesh.shape,
            table=_table(self.optimizer_rules),
        )
        sizes = self.mesh.shape
        replicated = jax.tree.map(lambda _: jax.P(), state)
        return replicated.replace(
            params=params,
            variables={
                name: self.tree_specs(tree, axes, name) for name, tree in state.variables.items()
            },
            opt_state=trees.map_named(lambda name, _: slots[name], state.opt_state),
            average=None if state.average is None else params,
            carry=jax.tree.map(
                lambda x: specs_lib.drop_uneven(self.row_spec, x.shape, sizes), state.carry
            ),
        )

    def shardings(self, specs: PyTree) -> PyTree:
        """Converts specs to shardings on this mesh."""
        return jax.tree.map(lambda spec: jax.NamedSharding(self.mesh, spec), specs)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the layout that `constrain` uses in models traced inside."""
        token = _active.set(self)
        try:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                yield
        finally:
            _active.reset(token)


_active: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


def active_layout() -> Layout | None:
    """Returns the layout that is active while code is traced, or None."""
    return _active.get()


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Splits an activation by the active layout's rules for its logical axes.

    Can be called in a model of any library; without a layout it does nothing. Dimensions that
    cannot be split evenly are not split.

    Args:
        x: The activation.
        *axes: Its logical axes, one per dimension; None is not split. "batch" is the rows.

    >>> constrain(np.ones((4, 2)), 'batch', 'embed').shape
    (4, 2)
    """
    layout = _active.get()
    if layout is None:
        return x
    sizes = layout.mesh.shape
    spec = specs_lib.from_logical(axes, layout.all_logical_rules, sizes)
    spec = specs_lib.drop_uneven(spec, x.shape, sizes)
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(layout.mesh, spec))


def local_rows(layout: Layout, n_rows: int) -> slice:
    """Returns which of the `n_rows` rows of a global batch this process must provide.

    Processes that compute different parts of a layer for the same rows all provide them.

    Raises:
        LayoutError: If the rows cannot be split evenly, or this process's rows are not
            contiguous because the devices of the mesh are not in the order of the processes.
    """
    check_rows(n_rows, layout.n_row_parts, layout)
    sharding = jax.NamedSharding(layout.mesh, layout.row_spec)
    parts = sharding.addressable_devices_indices_map((n_rows,)).values()
    ranges = sorted({part[0].indices(n_rows)[:2] for part in parts if part is not None})
    for (_, stop), (start, _) in itertools.pairwise(ranges):
        if stop != start:
            raise LayoutError(
                f"The rows {ranges} of this process are not contiguous. Order the devices of the "
                "mesh by process."
            )
    return slice(ranges[0][0], ranges[-1][1])


def check_rows(n_rows: int, n_parts: int, layout: Layout) -> None:
    """Raises if the rows of a batch cannot be split evenly.

    Raises:
        LayoutError: If `n_rows` is not divisible by `n_parts`.
    """
    if n_rows % n_parts:
        raise LayoutError(
            f"A batch of {n_rows} rows cannot be split into {n_parts} equal parts on the mesh "
            f"{layout}. Choose a batch size divisible by {n_parts}."
        )


def _shapes(tree: PyTree) -> dict[trees.Name, tuple[int, ...]]:
    return {name: tuple(np.shape(x)) for name, x in trees.named_leaves(tree).items()}


def _table(rules: Rules | str | None) -> Rules:
    return {".*": rules} if isinstance(rules, str) else rules or {}
