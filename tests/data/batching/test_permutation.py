import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekoa.data.batching import permutation


@given(st.integers(1, 9000), st.integers(-(2**70), 2**70), st.integers(0, 5))
def test_each_item_occurs_once(n, seed, epoch):
    items = permutation.permute(np.arange(n), n, (seed, epoch))
    np.testing.assert_array_equal(np.sort(items), np.arange(n))


@given(st.integers(1, 9000), st.data())
def test_item_does_not_depend_on_other_positions(n, draw):
    positions = draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    whole = permutation.permute(np.arange(n), n, (1, 2))
    np.testing.assert_array_equal(
        permutation.permute(np.array(positions), n, (1, 2)), whole[positions]
    )


@pytest.mark.parametrize("n", [24, 30000])
def test_positions_may_have_any_shape(n):
    flat = permutation.permute(np.arange(24), n, (1,))
    shaped = permutation.permute(np.arange(24).reshape(4, 6), n, (1,))
    np.testing.assert_array_equal(shaped, flat.reshape(4, 6))


@pytest.mark.parametrize("n", [10**9, 2**40])
def test_huge_permutation_is_not_stored(n):
    positions = np.array([0, 1, n // 2, n - 1])
    items = permutation.permute(positions, n, (3,))
    assert len(set(items.tolist())) == 4
    assert items.min() >= 0
    assert items.max() < n


@pytest.mark.parametrize("n", [1000, 4097, 60000])
def test_orders_of_two_keys_are_unrelated(n):
    a = permutation.permute(np.arange(n), n, (0, 0))
    b = permutation.permute(np.arange(n), n, (0, 1))
    # A random order has one fixed point on average; ten are less likely than 1e-6.
    assert (a == b).sum() < 10
    assert (a == np.arange(n)).sum() < 10
    for shift in (1, 2, 32):
        assert abs(np.corrcoef(a[:-shift], a[shift:])[0, 1]) < 5 / math.sqrt(n)


def test_all_orders_of_four_items_are_equally_likely():
    counts = {}
    n_keys = 4800
    for seed in range(n_keys):
        order = tuple(permutation.permute(np.arange(4), 4, (seed,)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi2 = sum((count - n_keys / 24) ** 2 / (n_keys / 24) for count in counts.values())
    assert chi2 < 49.7  # Exceeded with probability 0.001 at 23 degrees of freedom.


def test_positions_in_a_long_permutation_are_uniform():
    n, n_keys, n_bins = 5000, 2000, 10
    places = np.stack([permutation.permute(np.arange(0, n, 500), n, (s,)) for s in range(n_keys)])
    counts = np.stack([np.bincount(column * n_bins // n, minlength=n_bins) for column in places.T])
    expected = n_keys / n_bins
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 138  # 90 degrees of freedom, probability 0.001.


def test_order_never_changes():
    # Values of this implementation, frozen: a change would break the resuming of old runs.
    assert permutation.permute(np.arange(6), 6, (0, 0)).tolist() == FROZEN_SHORT
    assert permutation.permute(np.arange(6), 5000, (0, 0)).tolist() == FROZEN_LONG


FROZEN_SHORT = [0, 5, 4, 3, 1, 2]
FROZEN_LONG = [892, 1380, 850, 4155, 3078, 57]


def test_below_covers_exactly_its_range():
    drawn = {permutation.below(7, (seed,)) for seed in range(200)}
    assert drawn == set(range(7))


def test_generators_of_one_key_agree():
    a, b = permutation.generator((1, 2, 3)), permutation.generator((1, 2, 3))
    np.testing.assert_array_equal(a.random(4), b.random(4))
    assert permutation.generator((1, 2, 4)).random() != permutation.generator((1, 2, 3)).random()
