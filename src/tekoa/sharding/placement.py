"""Puts arrays on devices: states, models and batches, on one device or a mesh.

The mesh may span several processes. Each of them provides its own rows of a batch, and creates
or reads its own shards of the state.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tekoa import hosts
from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.core.model import LogicalAxes, ModelFns, Variables
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.sharding import layout as layout_lib
from tekoa.sharding import mesh
from tekoa.sharding.layout import Layout
from tekoa.sharding.specs import Rules

_log = logging.getLogger("tekoa")


def choose_layout(
    layout: Layout | None,
    devices: Sequence[Any] | None,
    optimizer_rules: Rules | str | None = None,
) -> Layout | None:
    """Returns the layout for the arguments of a loop, or None for a single device.

    Args:
        layout: A layout, or None.
        devices: Devices for plain data parallelism instead of a layout, or None.
        optimizer_rules: Rules that replace those of the layout.

    Raises:
        TypeError: If `layout` is something else, such as a mesh.
        ValueError: If the arguments contradict each other.
    """
    if not isinstance(layout, Layout | None):
        raise TypeError(f"layout must be a Layout, such as Layout(mesh), got {layout!r}.")
    if layout is not None and devices is not None:
        raise ValueError("Pass layout= or devices=, not both: a layout has its own devices.")
    if devices is not None:
        layout = Layout(mesh=mesh.make_mesh(devices=devices))
    if optimizer_rules is None:
        return layout
    if layout is None:
        raise ValueError("optimizer_rules= needs devices= or layout=, which define the mesh.")
    return dataclasses.replace(layout, optimizer_rules=optimizer_rules)


def put(values: Sequence[Any], shardings: Sequence[Any]) -> list[jax.Array]:
    """Puts arrays that are the same on all processes on the devices of their shardings.

    Unlike `jax.device_put` this does not compare the arrays of all processes first.

    Args:
        values: Arrays or keys, the same on all processes; or arrays that already span them.
        shardings: One for each value; None puts it on the default device.
    """
    local = [i for i, s in enumerate(shardings) if s is None or s.is_fully_addressable]
    moved = jax.device_put([values[i] for i in local], [shardings[i] for i in local])
    placed = dict(zip(local, moved, strict=True))
    return [
        placed[i] if i in placed else _put_remote(value, shardings[i])
        for i, value in enumerate(values)
    ]


def _put_remote(value: Any, sharding: Any) -> jax.Array:
    if _is_global(value):
        return jax.device_put(value, sharding)
    if trees.is_key(value):
        data = trees.to_numpy(value)
        spec = getattr(sharding, "spec", jax.P())
        # The integers of a key stay together on each device.
        padded = jax.NamedSharding(sharding.mesh, jax.P(*spec, *[None] * (data.ndim - len(spec))))
        return jax.random.wrap_key_data(_put_remote(data, padded), impl=jax.random.key_impl(value))
    on_host = np.asarray(value)
    return jax.make_array_from_callback(on_host.shape, sharding, lambda index: on_host[index])


def put_tree(tree: PyTree, shardings: PyTree) -> PyTree:
    """Puts a tree of arrays on devices; see `put`."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, put(leaves, treedef.flatten_up_to(shardings)))


def put_batch(batch: PyTree, shardings: PyTree) -> PyTree:
    """Starts the transfer of a batch to which every process contributes its own rows.

    Args:
        batch: This process's rows.
        shardings: A sharding for all arrays, or a tree of them; None is the default device.
    """
    is_none = lambda x: x is None  # noqa: E731
    targets = jax.tree.leaves(
        jax.tree.broadcast(shardings, batch, is_leaf=is_none), is_leaf=is_none
    )
    leaves, treedef = jax.tree.flatten(batch)
    if all(sharding is None or sharding.is_fully_addressable for sharding in targets):
        return jax.tree.unflatten(treedef, jax.device_put(leaves, targets))
    on_host = map(np.asarray, leaves)
    placed = map(jax.make_array_from_process_local_data, targets, on_host)
    return jax.tree.unflatten(treedef, placed)


def _is_global(x: Any) -> bool:
    """Returns whether other processes have parts of an array."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


class Placement:
    """Puts the states, models and batches of a run on its devices.

    Args:
        layout: How arrays are split; None puts all on the default device.
    """

    def __init__(self, layout: Layout | None):
        self.layout = layout
        self._whole = self._rows = self._state = None
        if layout is not None:
            self._whole = jax.NamedSharding(layout.mesh, jax.P())
            self._rows = jax.NamedSharding(layout.mesh, layout.row_spec)
        # On a single CPU device it is cheaper to pass numpy arrays to jit.
        is_single = layout is None or layout.mesh.size == 1
        self._puts_batches = not is_single or jax.default_backend() != "cpu"
        self._has_warned = False

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, without those of size 1."""
        return {} if self.layout is None else mesh.sizes_of(self.layout.mesh)

    @property
    def facts(self) -> dict[str, Any]:
        """The mesh and the number of processes, as stored with a checkpoint."""
        return {"mesh": self.sizes, "processes": hosts.current().count}

    def changes(self, facts: Mapping[str, Any]) -> str:
        """Describes how the mesh differs from that of a checkpoint; empty if it is the same."""
        if facts.get("mesh") is None:
            return ""
        old, new = _describe(facts), _describe(self.facts)
        return "" if old == new else f" Saved on {old}, now running on {new}."

    @property
    def spans_processes(self) -> bool:
        """Whether other processes have parts of the arrays."""
        return self._whole is not None and not self._whole.is_fully_addressable

    def fit(self, form: TrainState, axes: LogicalAxes) -> TrainState:
        """Determines the shardings of a state.

        Args:
            form: The state's shapes.
            axes: Logical axes of parameters and variables.

        Returns:
            The shapes with their shardings, for reading a state from disk.

        Raises:
            LayoutError: If a rule does not fit an array that it matches.
        """
        if self.layout is None:
            return form
        self._state = self.layout.shardings(self.layout.state_specs(form, axes))
        return jax.tree.map(with_sharding, form, self._state)

    def make(self, init: Callable[..., TrainState], *args: Any) -> TrainState:
        """Creates a state with the shardings determined by `fit`, without unsharded copies."""
        if self._state is None:
            return init(*args)
        return jax.jit(init, out_shardings=self._state)(*args)

    def state(self, state: TrainState) -> TrainState:
        """Puts a state on the devices determined by `fit`."""
        return state if self._state is None else put_tree(state, self._state)

    def model_shapes(
        self, fns: ModelFns, inputs: tuple[Any, ...]
    ) -> tuple[PyTree, Mapping[str, PyTree]]:
        """Returns the shapes and shardings of a model's arrays, for reading it from disk."""
        params, variables = jax.eval_shape(fns.init, jax.random.key(0), inputs)
        if self.layout is None:
            return params, variables
        shardings = self.model_shardings(fns, params, variables, inputs)
        return jax.tree.map(with_sharding, (params, dict(variables)), shardings)

    def new_model(
        self, fns: ModelFns, inputs: tuple[Any, ...]
    ) -> tuple[PyTree, Mapping[str, PyTree]]:
        """Creates a model's arrays with their shardings, without unsharded copies."""
        rng = jax.random.key(0)
        # Inputs differ among processes: each creates full arrays, and `model` splits them.
        if self.layout is None or self.spans_processes:
            return fns.init(rng, inputs)
        params, variables = jax.eval_shape(fns.init, rng, inputs)
        shardings = self.model_shardings(fns, params, variables, inputs)
        return jax.jit(fns.init, out_shardings=shardings)(rng, inputs)

    def model(
        self, fns: ModelFns, params: PyTree, variables: Variables, inputs: tuple[Any, ...]
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Puts a model's arrays on the mesh, unless they are there already."""
        if self._whole is None or all(
            isinstance(x, jax.Array) and x.sharding.device_set == self._whole.device_set
            for x in jax.tree.leaves((params, variables))
        ):
            return params, dict(variables)
        shardings = self.model_shardings(fns, params, variables, inputs)
        return put_tree((params, dict(variables)), shardings)

    def model_shardings(
        self, fns: ModelFns, params: PyTree, variables: Variables, inputs: tuple[Any, ...]
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Returns the sharding of each array of a model; without a layout, None for each."""
        layout = self.layout
        if layout is None:
            return jax.tree.map(lambda _: None, (params, dict(variables)))
        axes = {} if fns.axes is None else fns.axes(jax.random.key(0), inputs)
        specs = layout.tree_specs(params, axes)
        others = {name: layout.tree_specs(x, axes, name) for name, x in variables.items()}
        return layout.shardings((specs, others))

    def jit(self, step: Callable[..., Any]) -> Any:
        """Compiles a step over lists of arrays, whose first argument, the state, is donated."""
        if self._state is None:
            return jax.jit(self.traced(step), donate_argnums=0)
        # A state returned with other shardings would compile the step again.
        leaves = jax.tree.leaves(self._state)
        return jax.jit(self.traced(step), donate_argnums=0, out_shardings=(leaves, None))

    def jit_gathered(self, step: Callable[..., Any]) -> Any:
        """Compiles a step that returns a pair, whose first part is gathered on every process."""
        shardings = None if self._whole is None else (self._whole, None)
        return jax.jit(self.traced(step), out_shardings=shardings)

    def traced(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a step so that the layout is active while it is traced."""
        if self.layout is None:
            return step
        layout = self.layout

        def run(*args: Any) -> Any:
            with layout.active():
                return step(*args)

        run.__name__ = getattr(step, "__name__", "step")
        return run

    def whole(self, tree: PyTree) -> PyTree:
        """Puts a copy of each array on all devices."""
        if self._whole is None:
            return tree
        return put_tree(tree, jax.tree.map(lambda _: self._whole, tree))

    def check_rows(self, batch: Any) -> None:
        """Raises if the rows of a training batch cannot be split evenly.

        Raises:
            LayoutError: If their number is not divisible by the number of parts.
        """
        if self.layout is not None:
            layout_lib.check_rows(batches.n_rows(batch), self._n_local_parts, self.layout)

    def batch(self, batch: Any) -> Any:
        """Starts the transfer of a batch; its rows are split if that gives equal parts.

        With several processes each passes its own rows (see `sharding.layout.local_rows`), and
        the result is the global batch. A batch that is global already is returned unchanged.
        """
        if not self._puts_batches:
            return batch
        if self._rows is None:
            return jax.device_put(batch)
        if any(map(_is_global, jax.tree.leaves(batch))):
            return batch
        n_rows, n_parts = batches.n_rows(batch), self._n_local_parts
        if n_rows % n_parts:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "A batch of %d rows cannot be split into %d equal parts, so every device "
                    "computes all of it. Choose a batch size divisible by %d.",
                    n_rows, n_parts, n_parts,
                )  # fmt: skip
            return self.whole(batch)
        shardings = jax.tree.map(lambda x: self._rows if np.ndim(x) else self._whole, batch)
        return put_batch(batch, shardings)

    @functools.cached_property
    def _n_local_parts(self) -> int:
        """Number of parts into which this process's rows are split."""
        if self.layout is None:
            return 1
        rows = layout_lib.local_rows(self.layout, self.layout.n_row_parts)
        return rows.stop - rows.start


def with_sharding(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    """Returns a shape with a sharding, for reading an array from disk."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _describe(facts: Mapping[str, Any]) -> str:
    n_processes = facts.get("processes", 1)
    suffix = "" if n_processes == 1 else f" of {n_processes} processes"
    return mesh.describe(facts["mesh"]) + suffix
