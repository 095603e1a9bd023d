"""Device meshes with the axes `data`, `fsdp` and `model`, or with other axes.

A mesh has all three axes, with size 1 if not used, so that the same rules work for every mesh. A
mesh with axes of other names has only those that are set.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh


class LayoutError(ValueError):
    """A mesh, a rule or a batch does not fit the available devices or arrays."""


def make_mesh(
    *,
    data: int | None = None,
    fsdp: int = 1,
    model: int = 1,
    devices: Sequence[Any] | None = None,
    submesh: Sequence[int] | None = None,
    **other_axes: int | None,
) -> jax.sharding.Mesh:
    """Creates a mesh with the axes `data`, `fsdp` and `model`, or with axes of any other names.

    Args:
        data: Number of model replicas; None uses all remaining devices.
        fsdp: Number of parts into which the weights and the rows of each replica are split.
        model: Number of parts into which the computation of each layer is split.
        devices: Devices to use, by default those of all processes.
        submesh: Shape of the hardware block (x, y, z, cores) that computes one layer, for
            devices with coordinates; its product is `model`.
        **other_axes: Sizes of axes with other names; None uses all remaining devices. The mesh
            then has these axes and those of the three that are set. Name the axes that split the
            rows in `Layout(batch_axes=)`.

    Raises:
        LayoutError: If the number of devices does not fit the mesh.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'model': 1}
    >>> dict(make_mesh(x=1, y=None, devices=jax.devices()[:1]).shape)
    {'x': 1, 'y': 1}
    """
    chosen = list(jax.devices() if devices is None else devices)
    if submesh is not None:
        if model not in (1, math.prod(submesh)):
            raise LayoutError(
                f"A submesh {tuple(submesh)} has {math.prod(submesh)} devices, but model={model}."
            )
        model = math.prod(submesh)
    axes: dict[str, int | None] = {"data": data, "fsdp": fsdp, "model": model}
    if other_axes:
        axes = {name: n for name, n in axes.items() if n not in (None, 1)} | other_axes
    sizes = fill_sizes(axes, len(chosen))
    names, shape = tuple(sizes), tuple(sizes.values())
    # Devices stay unused only if all sizes are set.
    chosen = chosen[: math.prod(shape)]
    types = (jax.sharding.AxisType.Auto,) * len(names)
    if submesh is not None:
        return jax.sharding.Mesh(blocks(chosen, submesh).reshape(shape), names, axis_types=types)
    return jax.make_mesh(shape, names, axis_types=types, devices=tuple(chosen))


def fill_sizes(sizes: Mapping[str, int | None], n_devices: int) -> dict[str, int]:
    """Completes the sizes of a mesh: the axis with size None uses all remaining devices.

    Raises:
        LayoutError: If a size is below 1, or the number of devices does not fit.

    >>> fill_sizes({'data': None, 'fsdp': 1, 'model': 4}, 8)
    {'data': 2, 'fsdp': 1, 'model': 4}
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise LayoutError(f"The mesh axis {name!r} must have size 1 or more, got {size}.")
    if sum(size is None for size in sizes.values()) > 1:
        raise LayoutError(f"Only one axis of a mesh can use all remaining devices, got {sizes}.")
    fixed = math.prod(size for size in sizes.values() if size is not None)
    is_full = None not in sizes.values()
    if fixed > n_devices or (not is_full and n_devices % fixed):
        axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        raise LayoutError(
            f"The mesh {axes} needs {'' if is_full else 'a multiple of '}{fixed} devices, but "
            f"there are {n_devices}. Choose sizes whose product is the number of devices."
        )
    return {name: n_devices // fixed if size is None else size for name, size in sizes.items()}


def blocks(devices: Sequence[Any], submesh: Sequence[int]) -> np.ndarray:
    """Groups devices into blocks of a shape, as an array (blocks, devices per block).

    Devices without coordinates stay in their order.

    Raises:
        LayoutError: If the hardware cannot be divided into such blocks.
    """
    n = math.prod(submesh)
    if not all(hasattr(device, "coords") for device in devices):
        return np.fromiter(devices, object).reshape(-1, n)
    coordinates = np.array([(*d.coords, getattr(d, "core_on_chip", 0)) for d in devices])
    coordinates -= coordinates.min(axis=0)
    bounds = tuple(int(x) for x in coordinates.max(axis=0) + 1)
    shape = (*submesh, *(1,) * (len(bounds) - len(submesh)))
    fits = len(shape) == len(bounds) and not any(b % s for b, s in zip(bounds, shape))
    if not fits or math.prod(bounds) != len(devices):
        raise LayoutError(
            f"Hardware of shape {bounds} cannot be divided into blocks of shape {tuple(submesh)}: "
            "each size must be a divisor of the hardware's."
        )
    grid = np.empty(bounds, object)
    grid[tuple(coordinates.T)] = np.fromiter(devices, object)
    split = [part for b, s in zip(bounds, shape) for part in (b // s, s)]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return grid.reshape(split).transpose(order).reshape(-1, n)


def sizes_of(mesh: AnyMesh) -> dict[str, int]:
    """Returns the sizes of the axes larger than 1.

    >>> sizes_of(jax.sharding.AbstractMesh((2, 1), ('data', 'model')))
    {'data': 2}
    """
    return {name: size for name, size in mesh.shape.items() if size > 1}


def describe(sizes: Mapping[str, int]) -> str:
    """Describes the sizes of a mesh.

    >>> describe({'data': 2, 'model': 4}), describe({})
    ('data=2, model=4 (8 devices)', '1 device')
    """
    if not sizes:
        return "1 device"
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"{axes} ({math.prod(sizes.values())} devices)"
