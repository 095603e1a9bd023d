"""Finds NaN and Inf in the arrays that are being saved.

Training is guarded against them in losses, gradients and parameters, but not in the optimizer's
own arrays: a second moment that overflows to Inf stops its weight without any other sign.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tekoa.core import messages, trees
from tekoa.store.formats.arrays_write import own_shards

# The items that are examined; others, such as sums of metrics, may contain anything.
ITEMS = ("model_params", "optimizer_state", "average")
# Bounds the memory that a check needs.
_BLOCK = 1 << 20


class Watch:
    """Remembers which arrays contain NaN or Inf, so that each is reported once."""

    def __init__(self):
        self._known: set[trees.Name] = set()
        self._seen: set[trees.Name] = set()

    def look(self, values: Mapping[trees.Name, Any]) -> Iterator[str]:
        """Yields a line for each array that newly contains NaN or Inf.

        A scalar is reported only if it was finite before: optimizers use Inf as the initial value
        of a best loss or of a step size.

        Args:
            values: The arrays by name, which starts with the item.
        """
        for name, value in values.items():
            if name[0] not in ITEMS or not jnp.issubdtype(value.dtype, jnp.inexact):
                continue
            n_bad = sum(_count(shard) for _, shard in own_shards(value, is_writer=True))
            is_new = n_bad > 0 and name not in self._known
            if is_new and (np.ndim(value) or name in self._seen):
                yield (
                    f"{'/'.join(name)!r} ({messages.array_text(value.dtype.name, value.shape)}) "
                    f"contains {n_bad} values that are NaN or Inf. It is saved as it is. Lower the "
                    "learning rate, clip gradients, or resume from an earlier step."
                )
            (self._known.add if n_bad else self._known.discard)(name)
            self._seen.add(name)


def _count(array: np.ndarray) -> int:
    flat = array.reshape(-1)
    blocks = (flat[i : i + _BLOCK] for i in range(0, flat.size, _BLOCK))
    return sum(int(block.size - np.count_nonzero(np.isfinite(block))) for block in blocks)
