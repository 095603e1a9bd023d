"""Where state and batches live: as they come, or laid out on a mesh.

The mesh may span several processes: each gives its own rows of a batch, and all of them
make or read the same state, each its own shards.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tekoa.core import batch as batches
from tekoa.core import hosts, putting, sharding, sharding_mesh
from tekoa.core.model import ModelFns, Variables
from tekoa.core.sharding import Layout
from tekoa.core.sharding_specs import Rules
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree

_log = logging.getLogger("tekoa")


def choose_layout(
    layout: Layout | None,
    devices: Sequence[Any] | None,
    optimizer_rules: Rules | str | None = None,
) -> Layout | None:
    """Settles the layout from what a loop was given.

    Raises:
        ValueError: If both were given, or there is nothing to split an optimizer over.
    """
    if layout is not None and devices is not None:
        raise ValueError("Give layout= or devices=, not both: a layout names its devices.")
    if devices is not None:
        layout = Layout(mesh=sharding_mesh.make_mesh(devices=devices))
    if optimizer_rules is None:
        return layout
    if layout is None:
        raise ValueError("optimizer_rules= needs devices= or layout=: there is one device only.")
    return dataclasses.replace(layout, optimizer_rules=optimizer_rules)


class Placement:
    """Puts states and batches where they belong.

    Args:
        layout: How things are split; None: all on jax's default device.
    """

    def __init__(self, layout: Layout | None):
        self.layout = layout
        self._whole = self._rows = self._state = None
        if layout is not None:
            self._whole = jax.NamedSharding(layout.mesh, jax.P())
            self._rows = jax.NamedSharding(layout.mesh, layout.row_spec)
        # One CPU device: jit takes numpy arrays as they are, at less cost.
        is_one = layout is None or layout.mesh.size == 1
        self._is_put = not is_one or jax.default_backend() != "cpu"
        self._has_warned = False

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, those of size 1 left out: a fact of the run."""
        return {} if self.layout is None else sharding_mesh.sizes_of(self.layout.mesh)

    @property
    def facts(self) -> dict[str, Any]:
        """What of this is stored with a checkpoint."""
        return {"mesh": self.sizes, "processes": hosts.current().count}

    def changes(self, facts: Mapping[str, Any]) -> str:
        """Says in a sentence if a run goes on on another mesh; empty if it does not."""
        if facts.get("mesh") is None:
            return ""
        was, now = _described(facts), _described(self.facts)
        return "" if was == now else f" It was saved on {was} and goes on on {now}."

    @property
    def spans_processes(self) -> bool:
        """Whether other processes hold parts of the arrays."""
        return self._whole is not None and not self._whole.is_fully_addressable

    def fit(self, form: TrainState, axes: sharding.LogicalAxes) -> TrainState:
        """Settles where the arrays of a state live.

        Args:
            form: The state's shapes.
            axes: Logical axes of parameters and variables.

        Returns:
            The shapes with their shardings, as what is read from disk is to be placed.

        Raises:
            LayoutError: If a rule does not fit an array that it matches.
        """
        if self.layout is None:
            return form
        self._state = self.layout.shardings(self.layout.state_specs(form, axes))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), form, self._state
        )

    def make(self, init: Callable[..., TrainState], *args: Any) -> TrainState:
        """Makes a state of the form that was fitted, each shard where it belongs."""
        if self._state is None:
            return init(*args)
        return jax.jit(init, out_shardings=self._state)(*args)

    def state(self, state: TrainState) -> TrainState:
        """Puts a state of the form that was fitted where it belongs."""
        return state if self._state is None else _put(state, self._state)

    def new_model(
        self, fns: ModelFns, inputs: tuple[Any, ...]
    ) -> tuple[PyTree, Mapping[str, PyTree]]:
        """Makes a model's arrays, each shard where it belongs."""
        rng = jax.random.key(0)
        # Among processes inputs differ: each makes the whole, and `model` spreads it.
        if self.layout is None or self.spans_processes:
            return fns.init(rng, inputs)
        params, variables = jax.eval_shape(fns.init, rng, inputs)
        where = self.model_shardings(fns, params, variables, inputs)
        return jax.jit(fns.init, out_shardings=where)(rng, inputs)

    def model(
        self, fns: ModelFns, params: PyTree, variables: Variables, inputs: tuple[Any, ...]
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Puts a model's arrays where they belong, if they are not on the mesh already."""
        leaves = jax.tree.leaves((params, variables))
        if self._whole is None or all(
            isinstance(x, jax.Array) and x.sharding.device_set == self._whole.device_set
            for x in leaves
        ):
            return params, dict(variables)
        where = self.model_shardings(fns, params, variables, inputs)
        return _put((params, dict(variables)), where)

    def model_shardings(
        self, fns: ModelFns, params: PyTree, variables: Variables, inputs: tuple[Any, ...]
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Gives where a model's arrays belong; None for each without a layout."""
        layout = self.layout
        if layout is None:
            return jax.tree.map(lambda _: None, (params, dict(variables)))
        axes = {} if fns.axes is None else fns.axes(jax.random.key(0), inputs)
        specs = layout.tree_specs(params, axes)
        others = {name: layout.tree_specs(x, axes, name) for name, x in variables.items()}
        return layout.shardings((specs, others))

    def jit(self, step: Callable[..., Any]) -> Any:
        """Compiles a step over lists of arrays; it takes over the state it is given."""
        if self._state is None:
            return jax.jit(self.traced(step), donate_argnums=0)
        # A state that came back split otherwise would compile the step again.
        leaves = jax.tree.leaves(self._state)
        return jax.jit(self.traced(step), donate_argnums=0, out_shardings=(leaves, None))

    def jit_gathered(self, step: Callable[..., Any]) -> Any:
        """Compiles a step that gives a pair; its first part comes whole to every process."""
        whole = None if self._whole is None else (self._whole, None)
        return jax.jit(self.traced(step), out_shardings=whole)

    def traced(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Gives the step with this layout in force while it is traced."""
        if self.layout is None:
            return step
        layout = self.layout

        def run(*args: Any) -> Any:
            with layout.active():
                return step(*args)

        run.__name__ = getattr(step, "__name__", "step")
        return run

    def whole(self, tree: PyTree) -> PyTree:
        """Puts arrays on all devices."""
        if self._whole is None:
            return tree
        return _put(tree, jax.tree.map(lambda _: self._whole, tree))

    def check_rows(self, batch: Any) -> None:
        """Raises if a training batch cannot be split as the layout says.

        Raises:
            LayoutError: If its rows do not divide.
        """
        n_rows = batches.n_rows(batch)
        if self.layout is not None and n_rows % self._n_local_parts:
            raise sharding_mesh.LayoutError(
                f"A batch of {n_rows} rows does not divide among the {self._n_local_parts} parts "
                f"that the mesh {self.layout} splits it into. Choose a batch size that divides."
            )

    def batch(self, batch: Any) -> Any:
        """Starts the transfer of a batch, its rows split if their number divides.

        In a run of several processes each gives its own rows, as `sharding.local_rows` tells
        them; the result is the batch of all. One that is spread over them already stays.
        """
        if not self._is_put:
            return batch
        if self._rows is None:
            return jax.device_put(batch)
        if any(map(_is_global, jax.tree.leaves(batch))):
            return batch
        if (n_rows := batches.n_rows(batch)) % self._n_local_parts:
            self._warn(n_rows)
            return self.whole(batch)
        leaves, treedef = jax.tree.flatten(batch)
        where: list[Any] = [self._rows if np.ndim(x) else self._whole for x in leaves]
        if self.spans_processes:
            placed = list(map(_from_local, leaves, where))
        else:
            placed = jax.device_put(leaves, where)
        return jax.tree.unflatten(treedef, placed)

    @functools.cached_property
    def _n_local_parts(self) -> int:
        """Into how many parts this process's rows are split."""
        if self.layout is None:
            return 1
        rows = sharding.local_rows(self.layout, self.layout.n_row_parts)
        return rows.stop - rows.start

    def _warn(self, n_rows: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "A batch of %d rows does not divide among %d devices: each of them runs all of "
                "it. Choose a batch size that divides.",
                n_rows,
                self._n_local_parts,
            )


def _described(facts: Mapping[str, Any]) -> str:
    n_processes = facts.get("processes", 1)
    of = "" if n_processes == 1 else f" of {n_processes} processes"
    return sharding_mesh.describe(facts["mesh"]) + of


def _put(tree: PyTree, where: PyTree) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, putting.put(leaves, treedef.flatten_up_to(where)))


def _is_global(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _from_local(x: Any, where: jax.NamedSharding) -> jax.Array:
    return jax.make_array_from_process_local_data(where, np.asarray(x))
