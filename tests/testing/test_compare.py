import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.testing import assert_trees_equal


@pytest.mark.parametrize(
    "tree",
    [
        {"a": np.arange(6).reshape(2, 3), "b": [jnp.ones((), jnp.bfloat16), 2.5, None]},
        np.float32([np.nan, -0.0, np.inf]),
        jax.random.key(3),
        np.zeros((0, 3)),
        {},
    ],
)
def test_a_tree_equals_its_copy(tree):
    assert_trees_equal(tree, jax.tree.map(lambda x: x, tree))


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (
            {"layer": {"w": np.float32([[1, 2], [3, 4]])}},
            {"layer": {"w": np.float32([[1, 2], [5, 6]])}},
            ["'layer/w'", "(1, 0)", "3.0", "5.0", "2 of 4"],
        ),
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2)), ["1.0", "1.0000001"]),
        (np.float32([0.0]), np.float32([-0.0]), ["0.0", "-0.0"]),
        (jnp.ones(2, jnp.bfloat16), jnp.bfloat16([1, 2]), ["(1,)", "1", "2"]),
        ([np.ones(2)], [np.ones(2, np.float32)], ["'0'", "float64[2]", "float32[2]"]),
        ([np.ones(2)], [np.ones((2, 1))], ["float64[2]", "float64[2, 1]"]),
        ({"a": 1}, {"b": 1}, ["structure", "'a'", "'b'"]),
        (jax.random.key(1), jax.random.key(2), ["1", "2"]),
    ],
)
def test_the_first_difference_is_reported(a, b, words):
    with pytest.raises(AssertionError) as error:
        assert_trees_equal(a, b)
    for word in words:
        assert word in str(error.value)
