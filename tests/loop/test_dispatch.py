import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.loop import dispatch
from tekoa.loop.dispatch import Dispatcher
from tekoa.testing import assert_trees_equal


def step(leaves, batch):
    return [leaves[0] + batch.sum(), leaves[1] + 1], [batch.sum()]


def many(leaves, stacked):
    leaves, outputs = jax.lax.scan(step, leaves, stacked)
    return leaves, [x[-1] for x in outputs]


def make(wanted="auto", jit=jax.jit):
    return Dispatcher(step, many, wanted=wanted, jit=jit)


@pytest.fixture
def early(monkeypatch):
    """Measures at once, not after a thousand steps."""
    monkeypatch.setattr(dispatch, "_FIRST_STEP", 20)


def test_groups_fall_on_multiples_and_end_before_what_is_due():
    chosen = make(4)
    assert [chosen.n_next(at, 10) for at in range(9)] == [4, 1, 1, 1, 4, 1, 1, 1, 4]
    assert [chosen.n_next(8, left) for left in (5, 4, 3, 0)] == [4, 4, 1, 1]
    assert make().n_next(8, 100) == 1


def test_several_steps_at_once_do_what_they_do_one_by_one():
    batches = [np.full(3, i, np.float32) for i in range(4)]
    alone = [jnp.zeros(()), jnp.zeros((), jnp.int32)]
    for batch in batches:
        alone, outputs = make(1).one(alone, batch)
    run, stacked = make(4).program(batches)
    together, last = run([jnp.zeros(()), jnp.zeros((), jnp.int32)], stacked)
    assert_trees_equal(together, alone)
    assert_trees_equal(last, outputs)


def test_batches_of_numpy_are_stacked_where_the_device_can_read_them():
    for dtype in (np.float32, np.int32, np.uint8, bool):
        _, stacked = make(3).program([np.full((2, 5), i, dtype) for i in range(3)])
        assert stacked.ctypes.data % 64 == 0
        np.testing.assert_array_equal(stacked[:, 0, 0], np.arange(3).astype(dtype))


@pytest.mark.parametrize(("n_run", "n"), [(100, 11), (1000, 9), (50, 16), (10, 9), (9, 8)])
def test_the_number_leaves_as_few_single_steps_as_can_be(clock, n_run, n):
    chosen = make(jit=clock.jit_with({"step": 1e-3, "many": 1e-3}))
    leaves = [jnp.zeros(()), jnp.zeros((), jnp.int32)]
    chosen.choose(leaves, np.ones(3, np.float32), n_run)
    assert chosen.n_together == n


def test_when_to_measure_depends_on_numbers_of_steps_alone(early):
    chosen = make()
    due = [chosen.is_choice_due(*at) for at in ((19, 19), (20, 8), (20, 9), (5000, 1))]
    assert due == [False, False, True, False]
    assert not make(1).is_choice_due(5000, 100)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only programs move, and a jit that makes them do so."""
    fake = types.SimpleNamespace(now=0.0, ran=[])
    fake.perf_counter = lambda: fake.now
    monkeypatch.setattr(dispatch, "time", fake)

    def jit_with(seconds):
        def jit(fn):
            compiled = jax.jit(fn)

            def run(leaves, batch):
                fake.ran.append(fn.__name__)
                fake.now += seconds[fn.__name__]
                return compiled(leaves, batch)

            return run

        return jit

    fake.jit_with = jit_with
    return fake


@pytest.mark.parametrize(
    ("one", "many", "n"),
    [(1e-3, 2e-3, 8), (1e-3, 7.9e-3, 1), (1e-3, 0.2, 1), (1e-3, 2.0, 1), (2e-3, 1e-9, 1)],
    ids=["dispatch dominates", "no clear gain", "a scan is slow", "very slow", "steps are long"],
)
def test_the_faster_way_is_taken_and_said(clock, one, many, n):
    chosen = make(jit=clock.jit_with({"step": one, "many": many}))
    leaves = [jnp.zeros(()), jnp.zeros((), jnp.int32)]
    said = chosen.choose(leaves, np.ones(3, np.float32), 9)
    assert chosen.n_together == n
    assert f"{n} at a time" in said or "one goes to the device at a time" in said
    assert float(leaves[0]) == 0.0  # Measured on copies.


def test_long_steps_compile_no_second_program(clock):
    chosen = make(jit=clock.jit_with({"step": 2e-3, "many": 0.0}))
    chosen.choose([jnp.zeros(()), jnp.zeros((), jnp.int32)], np.ones(3, np.float32), 9)
    assert set(clock.ran) == {"step"}


def test_convolutions_on_cpu_are_not_tried(clock):
    @jax.jit
    def convolved(batch):
        return jax.lax.conv(batch[None, None, :], jnp.ones((1, 1, 2)), (1,), "SAME").sum()

    def step(leaves, batch):
        return [leaves[0] + convolved(batch)], [batch.sum()]

    seconds = {"step": 1e-3, "many": 0.0}
    chosen = Dispatcher(step, many, wanted="auto", jit=clock.jit_with(seconds))
    said = chosen.choose([jnp.zeros(())], np.ones(3, np.float32), 9)
    assert chosen.n_together == 1
    assert clock.ran == []
    assert "Convolutions" in said


def test_the_choice_is_made_at_the_same_step_and_is_saved(line, early, capsys):
    def choices():
        loop = line.loop(n_steps=60, n_steps_per_checkpoint=10, stdout=True)
        return {c.step: c.facts["steps_per_dispatch"] for c in loop}

    first, second = choices(), choices()
    for found in (first, second):
        assert [step for step, chosen in found.items() if chosen is None] == [10]
        assert len({chosen for step, chosen in found.items() if step >= 20}) == 1
    n_changes = sum(found[60] > 1 for found in (first, second))
    assert capsys.readouterr().out.count("at a time") == n_changes


def test_a_change_is_said_and_its_absence_is_not(line, early, monkeypatch, capsys):
    for n in (1, 4):

        def choose(self, *args, n=n):
            self.n_together = n
            return f"{n} at a time"

        monkeypatch.setattr(Dispatcher, "choose", choose)
        list(line.loop(n_steps=40, n_steps_per_checkpoint=10, stdout=True))
        assert ("at a time" in capsys.readouterr().out) == (n > 1)


def test_measuring_changes_no_number(line, early):
    alone = list(line.loop(n_steps=30, n_steps_per_checkpoint=10, steps_per_dispatch=1))[-1]
    measured = list(line.loop(n_steps=30, n_steps_per_checkpoint=10))[-1]
    for a, b in zip(
        jax.tree.leaves(measured.model_params), jax.tree.leaves(alone.model_params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert measured.data_state == alone.data_state
