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
def test_pairs_are_split_into_inputs_and_targets(batch, inputs, targets):
    split = batches.split_batch(batch)
    assert [len(part) for part in split] == [len(inputs), len(targets)]
    assert all(a is b for a, b in zip(split[0] + split[1], inputs + targets, strict=True))


def test_a_dict_is_both_the_input_and_the_target():
    batch = {"x": X}
    assert batches.split_batch(batch) == ((batch,), (batch,))


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ("text", "a str"),
        ((X, Y, Y), "a tuple of 3 entries"),
        (X, "a ndarray"),
        (None, "a NoneType"),
    ],
)
def test_other_batches_are_refused_with_their_type(batch, kind):
    with pytest.raises(TypeError, match=f"pairs .*; got {kind}"):
        batches.split_batch(batch)


@pytest.mark.parametrize("bad", ["cat", np.array(["cat"]), np.array([object()]), b"cat", {1, 2}])
def test_a_leaf_that_is_not_numeric_is_named(bad):
    with pytest.raises(TypeError, match=r"Entry '1/label' .* must be an array of numbers"):
        batches.check_arrays((X, {"label": bad}))


@pytest.mark.parametrize("good", [1, 2.5, True, np.float32(1), X, jnp.zeros(2)])
def test_numbers_and_arrays_are_valid_leaves(good):
    batches.check_arrays((good, good))


def test_microbatches_have_every_row_once_and_can_be_merged():
    x = np.arange(12).reshape(6, 2)
    parts = batches.microbatches({"x": x}, 3)
    assert parts["x"].shape == (3, 2, 2)
    assert sorted(np.ravel(parts["x"])) == list(range(12))
    np.testing.assert_array_equal(batches.undo_microbatches(parts)["x"], x)


def test_rows_not_divisible_by_accumulate_are_an_error():
    with pytest.raises(ValueError, match=r"accumulate=4 .*'x' has shape \(6, 2\)"):
        batches.microbatches({"x": np.zeros((6, 2))}, 4)


def test_scalars_do_not_count_as_rows():
    assert batches.n_rows((3.0, np.zeros((5, 1)))) == 5
    assert batches.n_rows((3.0,)) == 1


def test_the_description_names_each_array():
    described = batches.describe((np.zeros((4, 2), np.float32), {"y": np.zeros(4, np.int32)}))
    assert described == "0 float32[4,2], 1/y int32[4]"
