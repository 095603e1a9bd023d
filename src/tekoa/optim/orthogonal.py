"""Orthogonalised directions: steps that move all combinations of inputs alike.

A few directions dominate the gradients of a kernel. Making the singular values of a step about
equal, as Muon does, moves the others as fast. The cost must not depend on the size of the
kernel: it is divided into blocks along its smaller side, and products of whole blocks are only
formed twice.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.optim.scales.roles import Role

# Of Muon: an odd polynomial that brings singular values from 0.01 and above to about 1 when it is
# applied several times.
COEFFICIENTS = 3.4445, -4.7750, 2.0315


def is_matrix(role: Role) -> bool:
    """Whether a parameter is a hidden kernel with rows and columns of its own.

    Groups of a convolution that share an axis would be mixed by the orthogonalisation.
    """
    has_both = bool(role.contracted and role.free)
    return role.kind == "contracted" and not role.is_output and has_both and role.n_groups == 1


def orthogonalise(x: jax.Array, role: Role, *, n_iterations: int, max_side: int) -> jax.Array:
    """Returns a direction with singular values that are more equal, and with an rms of 1.

    The rms of a direction of n blocks is n ** -1/4: where blocks agree their steps add up, and the
    largest singular values of the whole would grow with the width of a model.

    Args:
        x: The direction of a kernel, whose rows are its contracted and whose columns its free
            axes. Copies, such as the layers of a stack, are treated separately.
        role: The role of the kernel.
        n_iterations: How often the singular values are mapped.
        max_side: The largest number of rows or columns of a block.

    >>> role = Role(kind='contracted', contracted=(0,), free=(1,))
    >>> x = jnp.array([[8.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> orthogonalise(x, role, n_iterations=3, max_side=64).round(1)
    Array([[1.7, 0. , 0. ],
           [0. , 1.7, 0. ]], dtype=float32)
    """
    if not x.size:
        return x
    sharding = jax.typeof(x).sharding
    if jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return _orthogonalise(x, role, n_iterations, max_side)
    # The compiler chooses how products of sharded blocks are sharded.
    on_auto_axes: Any = jax.sharding.auto_axes(
        lambda x: _orthogonalise(x, role, n_iterations, max_side), out_sharding=sharding
    )
    return on_auto_axes(x)


def _orthogonalise(x: jax.Array, role: Role, n_iterations: int, max_side: int) -> jax.Array:
    order, shape = blocks_of(x.shape, role, max_side)
    *copies, n_blocks, size, length = shape
    moved = jnp.transpose(x, order)
    rows = moved.reshape(*copies, -1, length)
    side = rows.shape[-2]
    rows = jnp.pad(rows, [*[(0, 0)] * len(copies), (0, n_blocks * size - side), (0, 0)])
    blocks = rows.reshape(shape)
    factor, squares = _factor(_product(blocks, jnp.swapaxes(blocks, -1, -2)), n_iterations)
    # The rms of the result, without a pass over it.
    square = jnp.sum(squares, axis=-3, keepdims=True) / (side * length) * n_blocks**0.5
    result = _product(factor * _inverse_root(square), blocks).reshape(rows.shape)
    back = [order.index(axis) for axis in range(x.ndim)]
    return jnp.transpose(result[..., :side, :].reshape(moved.shape), back)


def blocks_of(
    shape: Sequence[int], role: Role, max_side: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the order of a kernel's axes, and the shape of its blocks in that order.

    The smaller side comes first and is divided. The last block may be filled up with zeros.

    >>> role = Role(kind='contracted', contracted=(1,), free=(2,), batched=(0,))
    >>> blocks_of((6, 512, 100), role, 64)  # Six layers.
    ((0, 2, 1), (6, 2, 50, 512))
    """

    def size(axes: tuple[int, ...]) -> int:
        return math.prod(shape[axis] for axis in axes)

    smaller, larger = sorted((role.contracted, role.free), key=size)
    n_blocks = -(-size(smaller) // max_side)
    copies = [shape[axis] for axis in role.batched]
    blocks = *copies, n_blocks, -(-size(smaller) // n_blocks), size(larger)
    return (*role.batched, *smaller, *larger), blocks


def _factor(gram: jax.Array, n_iterations: int) -> tuple[jax.Array, jax.Array]:
    """Returns what to multiply x with so that its singular values are mapped.

    Every iteration multiplies x by a polynomial of x xT. These commute, so that it is enough to
    follow x xT, which is small, and the product of the polynomials.

    Args:
        gram: x xT.
        n_iterations: How often the singular values are mapped.

    Returns:
        The factor, and the sum of squares of its product with x.
    """
    a, b, c = COEFFICIENTS
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    scale = _inverse_root(_trace(gram))  # No singular value is above 1 then.
    gram, total = gram * jnp.square(scale), eye * scale
    for _ in range(n_iterations):
        factor = a * eye + b * gram + c * _product(gram, gram)
        gram, total = _product(factor, _product(gram, factor)), _product(factor, total)
    return total, _trace(gram)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")


def _trace(x: jax.Array) -> jax.Array:
    return jnp.trace(x, axis1=-2, axis2=-1)[..., None, None]


def _inverse_root(square: jax.Array) -> jax.Array:
    """Returns 1/sqrt(square), and 0 for 0, so that zeros stay zeros."""
    return jnp.where(square > 0, jax.lax.rsqrt(square), 0)
