import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.core import batch as batches

X, Y = np.zeros((4, 2)), np.zeros(4)


@pytest.mark.parametrize(
    ("batch", "inputs", "targets"),
    [
        ((X, Y), (X,), (Y,)),
        ([X, Y], (X,), (Y,)),
        (((X, X), (Y,)), (X, X), (Y,)),
        (((X,), ()), (X,), ()),
    ],
)
def test_pairs_are_taken_apart(batch, inputs, targets):
    found = batches.split_batch(batch)
    assert [len(part) for part in found] == [len(inputs), len(targets)]
    assert all(a is b for a, b in zip(found[0] + found[1], inputs + targets, strict=True))


def test_a_dict_is_the_one_input_and_the_one_target():
    batch = {"x": X}
    assert batches.split_batch(batch) == ((batch,), (batch,))


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        ("text", "a str"),
        ((X, Y, Y), "a tuple of 3 entries"),
        (X, "a ndarray"),
        (None, "a NoneType"),
    ],
)
def test_anything_else_is_refused_by_what_it_is(batch, seen):
    with pytest.raises(TypeError, match=f"pairs .*; got {seen}"):
        batches.split_batch(batch)


@pytest.mark.parametrize("bad", ["cat", np.array(["cat"]), np.array([object()]), b"cat", {1, 2}])
def test_a_leaf_that_is_not_numbers_is_named(bad):
    with pytest.raises(TypeError, match=r"Entry '1/label' .* must be an array of numbers"):
        batches.check_arrays((X, {"label": bad}))


@pytest.mark.parametrize("good", [1, 2.5, True, np.float32(1), X, jnp.zeros(2)])
def test_numbers_and_arrays_are_leaves(good):
    batches.check_arrays((good, good))


def test_parts_hold_every_row_once_and_can_be_put_back():
    x = np.arange(12).reshape(6, 2)
    parts = batches.microbatches({"x": x}, 3)
    assert parts["x"].shape == (3, 2, 2)
    assert sorted(np.ravel(parts["x"])) == list(range(12))
    np.testing.assert_array_equal(batches.undo_microbatches(parts)["x"], x)


def test_rows_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"accumulate=4 .*'x' has shape \(6, 2\)"):
        batches.microbatches({"x": np.zeros((6, 2))}, 4)


def test_scalars_have_no_rows():
    assert batches.n_rows((3.0, np.zeros((5, 1)))) == 5
    assert batches.n_rows((3.0,)) == 1


def test_a_description_names_each_array():
    described = batches.describe((np.zeros((4, 2), np.float32), {"y": np.zeros(4, np.int32)}))
    assert described == "0 float32[4,2], 1/y int32[4]"
