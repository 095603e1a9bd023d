"""Meshes of devices: the axes `data`, `fsdp` and `model`, made from sizes.

All three axes are always there, at size 1 where they are not used, so that one table of
rules serves every mesh.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

AXES = ("data", "fsdp", "model")

AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh


class LayoutError(ValueError):
    """A mesh, a rule or a batch that does not fit the devices or the arrays there are."""


def make_mesh(
    *,
    data: int | None = None,
    fsdp: int = 1,
    model: int = 1,
    devices: Sequence[Any] | None = None,
    submesh: Sequence[int] | None = None,
) -> jax.sharding.Mesh:
    """Makes a mesh whose axes are `data`, `fsdp` and `model`.

    Args:
        data: Copies of the model; None: as many as there are devices for.
        fsdp: Parts in which each copy's weights are kept besides its rows of the batch.
        model: Parts in which each layer is computed.
        devices: Devices to use, those of all processes by default.
        submesh: Shape of the block of hardware (x, y, z, cores) that computes one layer,
            where devices know their place; its product is `model`.

    Raises:
        LayoutError: If the devices are not as many as the mesh needs.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'model': 1}
    """
    chosen = list(jax.devices() if devices is None else devices)
    if submesh is not None:
        if model not in (1, math.prod(submesh)):
            raise LayoutError(
                f"A submesh {tuple(submesh)} has {math.prod(submesh)} devices, but model={model}."
            )
        model = math.prod(submesh)
    sizes = fill_sizes({"data": data, "fsdp": fsdp, "model": model}, len(chosen))
    n_needed = math.prod(sizes.values())
    # What is not asked for is left idle only where the sizes say so in full.
    chosen = chosen[:n_needed]
    shape = tuple(sizes.values())
    types = (jax.sharding.AxisType.Auto,) * len(AXES)
    if submesh is not None:
        return jax.sharding.Mesh(blocks(chosen, submesh).reshape(shape), AXES, axis_types=types)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=tuple(chosen))


def fill_sizes(sizes: Mapping[str, int | None], n_devices: int) -> dict[str, int]:
    """Completes the sizes of a mesh: the axis of size None takes what is left.

    Raises:
        LayoutError: If a size is below 1 or there are not as many devices.

    >>> fill_sizes({'data': None, 'fsdp': 1, 'model': 4}, 8)
    {'data': 2, 'fsdp': 1, 'model': 4}
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise LayoutError(f"The mesh axis {name!r} must have size 1 or more, got {size}.")
    fixed = math.prod(size for size in sizes.values() if size is not None)
    is_full = None not in sizes.values()
    if fixed > n_devices or (not is_full and n_devices % fixed):
        wanted = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        raise LayoutError(
            f"The mesh {wanted} needs {'' if is_full else 'a multiple of '}{fixed} devices, but "
            f"there are {n_devices}. Choose sizes whose product is the number of devices."
        )
    return {name: n_devices // fixed if size is None else size for name, size in sizes.items()}


def blocks(devices: Sequence[Any], submesh: Sequence[int]) -> np.ndarray:
    """Arranges devices as (blocks, devices of a block), each block of the given shape.

    Devices that do not know their place on the hardware are taken in their order.

    Raises:
        LayoutError: If the hardware cannot be cut into such blocks.
    """
    n = math.prod(submesh)
    if not all(hasattr(device, "coords") for device in devices):
        return _as_objects(devices).reshape(-1, n)
    places = np.array([(*d.coords, getattr(d, "core_on_chip", 0)) for d in devices])
    places -= places.min(axis=0)
    bounds = tuple(int(x) for x in places.max(axis=0) + 1)
    shape = (*submesh, *(1,) * (len(bounds) - len(submesh)))
    fits = len(shape) == len(bounds) and not any(b % s for b, s in zip(bounds, shape))
    if not fits or math.prod(bounds) != len(devices):
        raise LayoutError(
            f"Hardware of shape {bounds} cannot be cut into blocks of shape {tuple(submesh)}: each "
            "size must divide that of the hardware."
        )
    grid = np.empty(bounds, object)
    for place, device in zip(places, devices):
        grid[tuple(place)] = device
    split = [part for b, s in zip(bounds, shape) for part in (b // s, s)]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return grid.reshape(split).transpose(order).reshape(-1, n)


def _as_objects(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), object)
    array[:] = list(devices)
    return array


def sizes_of(mesh: AnyMesh) -> dict[str, int]:
    """The sizes of the axes that split something.

    >>> sizes_of(jax.sharding.AbstractMesh((2, 1), ('data', 'model')))
    {'data': 2}
    """
    return {name: size for name, size in mesh.shape.items() if size > 1}


def describe(sizes: Mapping[str, int]) -> str:
    """Names a mesh in a few words.

    >>> describe({'data': 2, 'model': 4}), describe({})
    ('data=2, model=4 (8 devices)', '1 device')
    """
    if not sizes:
        return "1 device"
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"{axes} ({math.prod(sizes.values())} devices)"
