"""Views follow the axes of a parameter through moves of its entries."""

from tekoa.optim.scales.views import NEW, View


def test_transpose_and_reshape_follow_every_axis():
    view = View.whole(3, (6, 4, 5)).transposed((2, 0, 1)).reshaped((5, 24))
    assert view is not None
    assert view.param == 3
    assert view.param_axes((0,)) == {2}
    assert view.param_axes((1,)) == {0, 1}
    assert view.shape == (5, 24)


def test_split_axis_belongs_to_the_same_axis_of_the_parameter():
    view = View.whole(0, (8, 12)).reshaped((8, 3, 4))
    assert view is not None
    assert view.param_axes((1,)) == view.param_axes((2,)) == {1}


def test_reshape_across_axes_that_do_not_divide_returns_none():
    assert View.whole(0, (4, 6)).reshaped((3, 8)) is None


def test_broadcast_adds_new_axes():
    view = View.whole(0, (4,)).broadcast((7, 4, 2), (1,))
    assert view.axes == (((NEW, 7),), ((0, 4),), ((NEW, 2),))
    assert view.param_axes((0, 2)) == frozenset()


def test_slice_of_a_stack_drops_the_axis_and_stores_the_index():
    view = View.whole(0, (5, 3, 4)).sliced((2, 0, 0), (1, 3, 4)).squeezed((0,))
    assert view.part == ((0, 2, 3),)
    assert view.shape == (3, 4)
    assert view.param_axes((0, 1)) == {1, 2}


def test_block_of_a_merged_axis_is_an_index_of_its_outer_axis():
    merged = View.whole(0, (8, 3, 4)).reshaped((8, 12))
    assert merged is not None
    view = merged.sliced((0, 4), (8, 4))
    assert view.part == ((1, 1, 2),)
    assert view.param_axes((1,)) == {2}


def test_full_slice_is_the_complete_parameter():
    assert View.whole(0, (4, 2)).sliced((0, 0), (4, 2)) == View.whole(0, (4, 2))


def test_joined_kernels_extend_along_the_joined_axis():
    view = View.whole(0, (8, 4)).within((8, 12))
    assert view.shape == (8, 12)
    assert view.param_axes((1,)) == {1}
    uneven = View.whole(0, (8, 4)).within((8, 10))
    assert uneven.shape == (8, 10)
    assert uneven.param_axes((1,)) == {1}


def test_a_shard_stores_the_number_of_shards_of_its_axis():
    view = View.whole(0, (8, 6)).sharded((2, 6))
    assert view.shape == (2, 6)
    assert view.n_shards({0}) == 4
    assert view.n_shards({1}) == 1


def test_gain_and_offset_follow_sums_and_products():
    view = View.whole(0, (4,)).shifted(1.0).scaled(3.0)
    assert (view.gain, view.offset) == (3.0, 3.0)
