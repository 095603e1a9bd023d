"""Kinds of use, pooled and settled."""

import math

import numpy as np
import pytest

from tekoa.optim import scale_uses
from tekoa.optim.scale_uses import Use
from tekoa.optim.scale_views import View

KERNEL = View.whole(0, (16, 8))


def contracted(axis=0, n_terms=16):
    return Use(kind=scale_uses.CONTRACTED, reduced=frozenset({axis}), n_terms=n_terms)


def settle(*records, shape=(16, 8)):
    ledger = scale_uses.Ledger()
    for view, use, ms in records:
        ledger.record(view, use, ms)
    return scale_uses.place(ledger.uses[0], shape)


@pytest.mark.parametrize(
    ("kind", "eta"),
    [
        (scale_uses.CONTRACTED, 1 / (4 * 3)),  # 16 terms of rms 3.
        (scale_uses.PAIRED, 0.5),  # 16 ** -1/4
        (scale_uses.ADDED, 1.5),
        (scale_uses.JOINED, 3.0),
        (scale_uses.MULTIPLIED, 1.0),
        (scale_uses.LOOKED_UP, 1.0),
    ],
)
def test_scale_of_each_kind_beside_data_of_rms_3(kind, eta):
    use = Use(kind=kind, reduced=frozenset({0}), n_terms=16)
    assert settle((KERNEL, use, 9.0)).eta == pytest.approx(eta)


def test_second_moments_of_one_use_are_averaged_over_its_occurrences():
    # rms of inputs with mean squares 1 and 7 is 2.
    found = settle((KERNEL, contracted(), 1.0), (KERNEL, contracted(), 7.0))
    assert found.eta == pytest.approx(1 / (4 * 2))


def test_gain_upstream_makes_the_parameter_that_much_smaller():
    assert settle((KERNEL.scaled(10.0), contracted(), 1.0)).eta == pytest.approx(1 / 40)


def test_of_different_uses_the_smaller_counts_and_both_are_told():
    looked_up = Use(kind=scale_uses.LOOKED_UP, reduced=frozenset({1}))
    found = settle((KERNEL, looked_up, 1.0), (KERNEL, contracted(1, 8), 1.0))
    assert found.eta == pytest.approx(8**-0.5)
    assert found.slot_shape == (16, 1)
    assert "tied" in found.reason
    assert "looked up (1)" in found.reason


def test_weak_use_counts_only_alone():
    weak = Use(kind=scale_uses.ARGUMENT, reduced=frozenset())
    assert settle((KERNEL, weak, 1.0), (KERNEL, contracted(), 1 / 1600)).eta == pytest.approx(10.0)
    assert settle((KERNEL, weak, 1.0)).eta == 1.0


def test_slices_of_a_stack_have_their_own_scales():
    stack = View.whole(0, (2, 16, 8))
    slices = [stack.sliced((i, 0, 0), (1, 16, 8)).squeezed((0,)) for i in range(2)]
    records = [(view, contracted(1), ms) for view, ms in zip(slices, (1.0, 16.0))]
    found = settle(*records, shape=(2, 16, 8))
    np.testing.assert_allclose(found.eta_by_slice, np.array([1 / 4, 1 / 16]).reshape(2, 1, 1))
    assert found.eta == pytest.approx(1 / 8)  # The geometric mean.
    assert found.slot_shape == (2, 1, 8)


def test_alike_slices_share_one_number():
    stack = View.whole(0, (2, 16, 8))
    slices = [stack.sliced((i, 0, 0), (1, 16, 8)).squeezed((0,)) for i in range(2)]
    found = settle(*[(view, contracted(1), 1.0) for view in slices], shape=(2, 16, 8))
    assert found.eta_by_slice is None


@pytest.mark.parametrize(
    ("kind", "shape", "reduced", "slot_shape"),
    [
        (scale_uses.ADDED, (8,), {0}, ()),
        (scale_uses.ADDED, (1,), set(), ()),
        (scale_uses.ADDED, (4, 8), {1}, (4, 1)),
        (scale_uses.MULTIPLIED, (), set(), ()),
        (scale_uses.CONTRACTED, (8, 1), {0}, (1, 1)),
        (scale_uses.CONTRACTED, (8,), {0}, ()),
        (scale_uses.LOOKED_UP, (9, 8), {1}, (9, 1)),
    ],
)
def test_slot_shape(kind, shape, reduced, slot_shape):
    use = Use(kind=kind, reduced=frozenset(reduced))
    assert settle((View.whole(0, shape), use, 1.0), shape=shape).slot_shape == slot_shape


def test_zero_data_gives_a_note_and_no_use():
    ledger = scale_uses.Ledger()
    ledger.record(KERNEL, contracted(), 0.0)
    assert not ledger.uses
    assert ledger.notes[0] == "contracted only with data that is zero"


def test_parameters_are_counted_by_first_use():
    ledger = scale_uses.Ledger()
    other = View.whole(5, (3,))
    assert [ledger.order(view) for view in (other, KERNEL, other)] == [0, 1, 0]


def test_target_scales_the_kernel():
    use = Use(kind=scale_uses.CONTRACTED, reduced=frozenset({0}), n_terms=16, target=0.5)
    assert settle((KERNEL, use, 1.0)).eta == pytest.approx(1 / 8)
    assert math.isclose(scale_uses.BIAS_SCALE, 0.5)
