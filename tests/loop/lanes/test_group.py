"""Loops that differ in numbers only run together, each with the bits of a loop by itself."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tekoa
from tekoa.core.nonfinite import NonFiniteError
from tekoa.loop.lanes import group

X = np.random.default_rng(0).normal(size=(30, 4, 3)).astype(np.float32)


class Net(nn.Module):
    width: int = 5

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(self.width)(x)))
        return nn.Dense(1)(x)[:, 0]


def make_loop(rate=0.1, seed=0, *, width=5, limit=None, on_nan="stop", optimizer=optax.adamw):
    def loss(out, y):
        value = jnp.mean((out - y) ** 2)
        return value if limit is None else value / (value > limit)

    rows = X[np.random.default_rng(seed).permutation(len(X))]
    task = tekoa.TrainTask(
        optimizer=optimizer(rate),
        loss=loss,
        data=[(x, x.sum(axis=1)) for x in rows],
    )
    return tekoa.TrainLoop(
        Net(width),
        task,
        n_steps=12,
        n_steps_per_checkpoint=4,
        rng=jax.random.key(seed),
        steps_per_dispatch=1,
        stdout=False,
        on_nan=on_nan,
    )


def train(loops):
    """Drives loops as a sweep does; returns the last checkpoint of each, or its error."""
    ends: list = [None] * len(loops)
    while waiting := [
        i for i, loop in enumerate(loops) if loop.step < 12 and not is_error(ends[i])
    ]:
        step = min(loops[i].step for i in waiting)
        for i in waiting:
            if loops[i].step != step:
                continue
            try:
                ends[i] = loops[i].next_checkpoint()
            except NonFiniteError as error:
                ends[i] = error
                loops[i].parts[1].group.end(loops[i].parts[1])
    return ends


def is_error(value):
    return isinstance(value, Exception)


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(x, y)
    assert a.data_state == b.data_state
    assert a.metrics["train"]["loss"] == b.metrics["train"]["loss"]


SETTINGS = [(0.1, 0), (0.01, 0), (0.1, 1)]


def test_lane_has_the_bits_of_a_loop_by_itself():
    loops = [make_loop(*setting) for setting in SETTINGS]
    assert group.join(loops, "turn") == [[0, 1, 2]]
    ends = train(loops)
    for setting, end in zip(SETTINGS, ends, strict=True):
        *_, alone = make_loop(*setting)
        assert_same_bits(end, alone)


def test_vmap_is_close_and_others_run_alone():
    loops = [make_loop(0.1), make_loop(0.01), make_loop(width=6)]
    assert group.join(loops, "vmap") == [[0, 1], [2]]
    ends = train(loops)
    *_, alone = make_loop(0.01)
    np.testing.assert_allclose(ends[1].loss, alone.loss, rtol=1e-5)
    *_, wide = make_loop(width=6)
    assert_same_bits(ends[2], wide)


@pytest.mark.parametrize("how", ["turn", "vmap"])
def test_nan_ends_one_lane_at_its_last_good_step(how):
    loops = [make_loop(limit=0.0), make_loop(limit=3.0)]
    group.join(loops, how)
    ends = train(loops)
    with pytest.raises(NonFiniteError) as alone:
        list(make_loop(limit=3.0))
    assert str(ends[1]) == str(alone.value)
    *_, good = make_loop(limit=0.0)
    assert ends[0].step == good.step == 12
    np.testing.assert_allclose(ends[0].loss, good.loss, rtol=1e-5)


@pytest.mark.slow
def test_skipped_steps_are_those_of_a_loop_by_itself():
    loops = [make_loop(limit=0.0, on_nan="skip"), make_loop(limit=3.0, on_nan="skip")]
    group.join(loops)
    ends = train(loops)
    *_, alone = make_loop(limit=3.0, on_nan="skip")
    assert alone.metrics["train"]["skipped_steps"] > 0
    assert_same_bits(ends[1], alone)


def test_lane_that_is_behind_catches_up():
    loops = [make_loop(0.1), make_loop(0.01)]
    loops[1].next_checkpoint()
    group.join(loops)
    ends = train(loops)
    *_, alone = make_loop(0.1)
    assert_same_bits(ends[0], alone)


def test_an_infinite_update_in_the_last_step_before_a_stop_is_noticed():
    def overflowing(rate):
        schedule = optax.scale_by_schedule(lambda count: jnp.where(count == 1, jnp.inf, 1.0))
        return optax.chain(optax.adamw(rate), schedule)

    loops = [make_loop(rate, optimizer=overflowing) for rate in (0.1, 0.01)]
    group.join(loops, "turn")
    flag = threading.Event()
    for loop in loops:
        loop.stop_flag = flag
        loop.before_dispatch = lambda step: flag.set() if step == 1 else None
    for loop in loops:
        with pytest.raises(NonFiniteError, match="back at step 1"):
            loop.next_checkpoint()
