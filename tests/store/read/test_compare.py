import jax
import numpy as np

from tekoa.store.read import compare


def test_the_first_difference_is_named_and_the_others_are_counted():
    a = {"v": np.zeros(3), "w": np.ones((2, 2), np.float32), "z": np.zeros(1)}
    b = {"v": np.zeros(3), "w": np.array([[1, 1], [5, 1]], np.float32), "z": np.ones(1)}
    difference = compare.first_difference(a, b)
    assert difference is not None
    assert (difference.name, difference.n_leaves) == ("w", 2)
    assert "'w' differs at index (1, 0)" in str(difference)
    assert str(difference).endswith("1 of 4 entries differ. 1 more arrays differ.")
    assert compare.first_difference(a, a) is None


def test_signs_of_zero_nans_dtypes_and_keys_count():
    zero, nan = np.zeros(1), np.array([np.nan])
    assert compare.first_difference([zero], [-zero]) is not None
    assert compare.first_difference([nan], [nan.copy()]) is None
    assert "differs in type" in str(compare.first_difference([zero], [zero.astype(np.float32)]))
    keys = [jax.random.key(0)], [jax.random.key(1)]
    assert compare.first_difference(*keys) is not None
    assert "structure" in str(compare.first_difference([zero], [zero, zero]))
