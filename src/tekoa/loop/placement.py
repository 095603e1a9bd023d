"""Where state and batches live: as they come, or split over devices."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tekoa.core import batch as batches
from tekoa.core.trees import PyTree

_log = logging.getLogger("tekoa")


class Placement:
    """Puts states and batches where they belong.

    Args:
        devices: Devices among which the rows of a batch are split; None: jax's default.
    """

    def __init__(self, devices: Sequence[jax.Device] | None):
        self._whole = self._rows = None
        self._n_devices = 1 if devices is None else len(devices)
        if devices is not None:
            mesh = jax.make_mesh(
                (self._n_devices,),
                ("data",),
                axis_types=(jax.sharding.AxisType.Auto,),
                devices=tuple(devices),
            )
            self._whole = jax.NamedSharding(mesh, jax.P())
            self._rows = jax.NamedSharding(mesh, jax.P("data"))
        # One CPU device: jit takes numpy arrays as they are, at less cost.
        self._is_put = self._rows is not None or jax.default_backend() != "cpu"
        self._has_warned = False

    def jit(self, step: Callable[..., Any]) -> Any:
        """Compiles a step that takes over the state it is given."""
        if self._whole is None:
            return jax.jit(step, donate_argnums=0)
        # A state that came back split otherwise would compile the step again.
        return jax.jit(step, donate_argnums=0, out_shardings=(self._whole, None))

    def whole(self, tree: PyTree) -> PyTree:
        """Puts arrays on all devices."""
        return tree if self._whole is None else jax.device_put(tree, self._whole)

    def batch(self, batch: Any) -> Any:
        """Starts the transfer of a batch, its rows split if their number divides."""
        if not self._is_put:
            return batch
        n_rows = batches.n_rows(batch)
        if n_rows % self._n_devices == 0:
            return jax.device_put(batch, self._rows)
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "A batch of %d rows does not divide among %d devices: each of them runs all of "
                "it. Choose a batch size that divides.",
                n_rows,
                self._n_devices,
            )
        return jax.device_put(batch, self._whole)
