"""Kinds of use, how they are pooled, and the scale that follows."""

import math

import numpy as np
import pytest

from tekoa.optim.scales import uses
from tekoa.optim.scales.uses import Use
from tekoa.optim.scales.views import View

KERNEL = View.whole(0, (16, 8))


def contracted(axis=0, n_terms=16):
    return Use(kind=uses.CONTRACTED, reduced=frozenset({axis}), n_terms=n_terms)


def decide(*occurrences, shape=(16, 8)):
    record = uses.UseRecord()
    for view, use, ms in occurrences:
        record.add(view, use, ms)
    return uses.decide(record.by_param[0], shape)


@pytest.mark.parametrize(
    ("kind", "eta"),
    [
        (uses.CONTRACTED, 1 / (4 * 3)),  # 16 terms of rms 3.
        (uses.PAIRED, 0.5),  # 16 ** -1/4
        (uses.ADDED, 1.5),
        (uses.JOINED, 3.0),
        (uses.MULTIPLIED, 1.0),
        (uses.LOOKED_UP, 1.0),
    ],
)
def test_scale_of_each_kind_with_data_of_rms_3(kind, eta):
    use = Use(kind=kind, reduced=frozenset({0}), n_terms=16)
    assert decide((KERNEL, use, 9.0)).eta == pytest.approx(eta)


def test_mean_squares_are_averaged_over_occurrences():
    # rms of inputs with mean squares 1 and 7 is 2.
    decision = decide((KERNEL, contracted(), 1.0), (KERNEL, contracted(), 7.0))
    assert decision.eta == pytest.approx(1 / (4 * 2))


def test_a_constant_factor_divides_the_scale():
    assert decide((KERNEL.scaled(10.0), contracted(), 1.0)).eta == pytest.approx(1 / 40)


def test_of_different_uses_the_smaller_scale_counts_and_both_are_reported():
    looked_up = Use(kind=uses.LOOKED_UP, reduced=frozenset({1}))
    decision = decide((KERNEL, looked_up, 1.0), (KERNEL, contracted(1, 8), 1.0))
    assert decision.eta == pytest.approx(8**-0.5)
    assert decision.slot_shape == (16, 1)
    assert "tied" in decision.reason
    assert "looked up (1)" in decision.reason


def test_a_weak_use_counts_only_if_there_is_no_other():
    weak = Use(kind=uses.ARGUMENT, reduced=frozenset())
    assert decide((KERNEL, weak, 1.0), (KERNEL, contracted(), 1 / 1600)).eta == pytest.approx(10.0)
    assert decide((KERNEL, weak, 1.0)).eta == 1.0


def test_slices_of_a_stack_have_separate_scales():
    stack = View.whole(0, (2, 16, 8))
    slices = [stack.sliced((i, 0, 0), (1, 16, 8)).squeezed((0,)) for i in range(2)]
    occurrences = [(view, contracted(1), ms) for view, ms in zip(slices, (1.0, 16.0))]
    decision = decide(*occurrences, shape=(2, 16, 8))
    np.testing.assert_allclose(decision.eta_by_slice, np.array([1 / 4, 1 / 16]).reshape(2, 1, 1))
    assert decision.eta == pytest.approx(1 / 8)  # The geometric mean.
    assert decision.slot_shape == (2, 1, 8)


def test_similar_slices_share_one_scale():
    stack = View.whole(0, (2, 16, 8))
    slices = [stack.sliced((i, 0, 0), (1, 16, 8)).squeezed((0,)) for i in range(2)]
    decision = decide(*[(view, contracted(1), 1.0) for view in slices], shape=(2, 16, 8))
    assert decision.eta_by_slice is None


@pytest.mark.parametrize(
    ("kind", "shape", "reduced", "slot_shape"),
    [
        (uses.ADDED, (8,), {0}, ()),
        (uses.ADDED, (1,), set(), ()),
        (uses.ADDED, (4, 8), {1}, (4, 1)),
        (uses.MULTIPLIED, (), set(), ()),
        (uses.CONTRACTED, (8, 1), {0}, (1, 1)),
        (uses.CONTRACTED, (8,), {0}, ()),
        (uses.LOOKED_UP, (9, 8), {1}, (9, 1)),
    ],
)
def test_slot_shape(kind, shape, reduced, slot_shape):
    use = Use(kind=kind, reduced=frozenset(reduced))
    assert decide((View.whole(0, shape), use, 1.0), shape=shape).slot_shape == slot_shape


def test_zero_data_gives_a_note_and_no_use():
    record = uses.UseRecord()
    record.add(KERNEL, contracted(), 0.0)
    assert not record.by_param
    assert record.notes[0] == "contracted only with data that is zero"


def test_parameters_are_numbered_by_first_use():
    record = uses.UseRecord()
    other = View.whole(5, (3,))
    assert [record.order(view) for view in (other, KERNEL, other)] == [0, 1, 0]


def test_target_scales_the_kernel():
    use = Use(kind=uses.CONTRACTED, reduced=frozenset({0}), n_terms=16, target=0.5)
    assert decide((KERNEL, use, 1.0)).eta == pytest.approx(1 / 8)
    assert math.isclose(uses.BIAS_SCALE, 0.5)
