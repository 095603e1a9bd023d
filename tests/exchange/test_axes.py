"""Expressions for axes."""

import numpy as np
import pytest

from tekoa.exchange import axes


def test_axes_are_moved_and_merged():
    x = np.arange(24).reshape(4, 2, 3)
    expected = x.transpose(1, 2, 0).reshape(6, 4)
    np.testing.assert_array_equal(axes.arrange(x, "d h k -> (h k) d"), expected)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("i o -> o i", (2, 3)),
        ("h w i o -> o i h w", (2, 3, 4, 5)),
        ("d h k -> (h k) d", (4, 2, 3)),
        ("o 1 1 -> o", (5, 1, 1)),
        ("a b c -> b (c a)", (2, 3, 4)),
    ],
)
def test_undo_is_the_inverse(text, shape):
    x = np.random.default_rng(0).normal(size=shape)
    np.testing.assert_array_equal(axes.undo(axes.arrange(x, text), text, shape), x)


@pytest.mark.parametrize("text", ["i o", "i o -> o", "i i -> i i", "a b -> (a b", "a -> b"])
def test_wrong_expressions_are_refused(text):
    with pytest.raises(ValueError, match="must have the form"):
        axes.parse(text)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="does not have the axes"):
        axes.arrange(np.zeros((2, 3, 4)), "i o -> o i")
    with pytest.raises(ValueError, match="Expected an array of shape"):
        axes.undo(np.zeros((2, 3)), "i o -> o i", (2, 3))
