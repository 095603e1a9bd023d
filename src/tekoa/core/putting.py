"""Arrays that every process holds whole, put on devices of several processes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def put(values: Sequence[Any], shardings: Sequence[Any]) -> list[jax.Array]:
    """Puts each array where its sharding says; each process gives its devices their part.

    `jax.device_put` compares whole arrays among processes first; these are known to be the
    same.

    Args:
        values: Arrays, of keys too, the same on all processes; or arrays that are already
            spread over all of them.
        shardings: One for each; None leaves it on the default device.
    """
    is_far = [sharding is not None and not sharding.is_fully_addressable for sharding in shardings]
    near = [i for i, far in enumerate(is_far) if not far]
    moved = jax.device_put([values[i] for i in near], [shardings[i] for i in near])
    placed = dict(zip(near, moved, strict=True))
    return [
        placed[i] if i in placed else _put_far(value, shardings[i])
        for i, value in enumerate(values)
    ]


def _put_far(value: Any, sharding: Any) -> jax.Array:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jax.device_put(value, sharding)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(value))
        spec = getattr(sharding, "spec", jax.P())
        # The key's own numbers stay together on each device.
        whole = jax.NamedSharding(sharding.mesh, jax.P(*spec, *[None] * (data.ndim - len(spec))))
        return jax.random.wrap_key_data(_put_far(data, whole), impl=jax.random.key_impl(value))
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])
