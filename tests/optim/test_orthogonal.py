"""Orthogonalised directions: which parameters, their singular values, blocks and copies."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.optim import orthogonal
from tekoa.optim.scales.roles import Role

MATRIX = Role(kind="contracted", contracted=(0,), free=(1,))


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def orthogonalise(x, role=MATRIX, n_iterations=3, max_side=64):
    return np.asarray(
        orthogonal.orthogonalise(jnp.asarray(x), role, n_iterations=n_iterations, max_side=max_side)
    )


def of_rms_1(x):
    return x / np.sqrt(np.mean(np.square(x, dtype=np.float64)))


@pytest.mark.parametrize(
    ("role", "is_matrix"),
    [
        (Role(kind="contracted", contracted=(0,), free=(1,)), True),
        (Role(kind="contracted", contracted=(1,), free=(2,), batched=(0,)), True),
        (Role(kind="contracted", contracted=(0,), free=(1,), is_output=True), False),
        (Role(kind="contracted", contracted=(0, 1), batched=(2,)), False),  # Depthwise.
        (Role(kind="contracted", contracted=(0,), free=(1,), n_groups=2), False),
        (Role(kind="looked up", contracted=(0,), free=(1,)), False),
        (Role(kind="added", free=(0,)), False),
    ],
)
def test_which_parameters_are_matrices(role, is_matrix):
    assert orthogonal.is_matrix(role) == is_matrix


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (1, 7)])
def test_one_block_is_that_of_muon(shape):
    x = normal(0, shape)
    tx = optax.contrib.scale_by_muon(
        ns_steps=3, weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers(0, 1)}
    )
    expected, _ = tx.update({"w": x}, tx.init({"w": x}))
    np.testing.assert_allclose(orthogonalise(x), of_rms_1(expected["w"]), rtol=1e-4, atol=1e-5)


def test_singular_values_become_more_equal_and_singular_vectors_stay():
    u, _ = np.linalg.qr(normal(0, (6, 6)))
    v, _ = np.linalg.qr(normal(1, (9, 9)))
    x = (u * [1, 0.5, 0.2, 0.1, 0.05, 0.03]) @ v[:6]
    mapped = u.T @ orthogonalise(x) @ v.T
    values = np.diag(mapped)
    np.testing.assert_allclose(mapped, np.eye(6, 9) * values[:, None], atol=1e-4)
    assert values.max() / values.min() < 2


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (8, 8)])
def test_blocks_divide_the_smaller_side_and_move_alike(shape):
    x = normal(0, shape)
    rows = x if shape[0] <= shape[1] else x.T
    size = -(-len(rows) // -(-len(rows) // 3))
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    mapped = []
    for part in parts:
        u, s, v = np.linalg.svd(part.astype(np.float64), full_matrices=False)
        s = s / np.sqrt(np.sum(s**2))
        for _ in range(3):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        mapped.append((u * s) @ v)
    expected = len(parts) ** -0.25 * of_rms_1(np.concatenate(mapped))
    result = orthogonalise(x, max_side=3)
    result = result if shape[0] <= shape[1] else result.T
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)


def test_directions_of_wide_kernels_are_smaller_by_the_number_of_their_blocks():
    for width, n_blocks in ((64, 1), (65, 2), (200, 4)):
        rms = np.sqrt(np.mean(np.square(orthogonalise(normal(0, (300, width))))))
        assert rms == pytest.approx(n_blocks**-0.25, rel=1e-4), width


def test_axes_that_are_several_and_copies_are_those_of_the_role():
    role = Role(kind="contracted", contracted=(1, 3), free=(2,), batched=(0,))
    x = normal(0, (2, 3, 5, 4)) * np.array([1, 100], np.float32).reshape(2, 1, 1, 1)
    result = orthogonalise(x, role, max_side=2)
    for copy, direction in zip(result, x):
        alone = orthogonalise(direction.swapaxes(1, 2).reshape(12, 5), max_side=2)
        np.testing.assert_allclose(copy.swapaxes(1, 2).reshape(12, 5), alone, rtol=1e-4, atol=1e-5)


def test_size_of_a_direction_does_not_matter_and_zero_stays_zero():
    x = normal(0, (6, 9))
    np.testing.assert_allclose(orthogonalise(1e-12 * x), orthogonalise(x), rtol=1e-4, atol=1e-5)
    assert not np.any(orthogonalise(0 * x))


def test_not_a_number_is_not_hidden():
    x = normal(0, (6, 9))
    x[2, 3] = np.nan
    assert np.isnan(orthogonalise(x)).any()
