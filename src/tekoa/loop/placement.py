"""Where state and batches live: as they come, or split over devices."""

from collections.abc import Sequence
from typing import Any

import jax

from tekoa.core import batch as batches
from tekoa.core.state import TrainState


class Placement:
    """Puts states and batches where they belong."""

    def __init__(self, devices: Sequence[jax.Device] | None):
        if devices is None:
            self._whole = self._rows = None
        else:
            mesh = jax.make_mesh((len(devices),), ("data",), devices=tuple(devices))
            self._whole = jax.NamedSharding(mesh, jax.P())
            self._rows = jax.NamedSharding(mesh, jax.P("data"))
        self._is_put = self._rows is not None or jax.default_backend() != "cpu"

    def state(self, state: TrainState) -> TrainState:
        """Puts the state on all devices."""
        return state if self._whole is None else jax.device_put(state, self._whole)

    def batch(self, batch: Any) -> Any:
        """Starts the transfer of a batch.

        Raises:
            ValueError: If its rows cannot be shared out evenly.
        """
        if not self._is_put:
            # One CPU device: jit takes numpy arrays as they are, at less cost.
            return batch
        try:
            return jax.device_put(batch, self._rows)
        except ValueError as error:
            n_devices = 1 if self._rows is None else self._rows.mesh.size
            raise ValueError(
                f"A batch of {batches.n_rows(batch)} rows does not divide among {n_devices} "
                "devices. Choose a batch size that does."
            ) from error
