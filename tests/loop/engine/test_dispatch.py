import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.loop.engine import dispatch
from tekoa.loop.engine.dispatch import Dispatcher
from tekoa.testing import assert_trees_equal


def step(leaves, batch):
    return [leaves[0] + batch.sum(), leaves[1] + 1], [batch.sum()]


def many(leaves, stacked):
    leaves, outputs = jax.lax.scan(step, leaves, stacked)
    return leaves, [x[-1] for x in outputs]


def make(steps_per_dispatch="auto", jit=jax.jit):
    return Dispatcher(step, many, steps_per_dispatch=steps_per_dispatch, jit=jit)


@pytest.fixture
def early(monkeypatch):
    """Measures early, not after a thousand steps."""
    monkeypatch.setattr(dispatch, "_FIRST_STEP", 20)


def test_groups_start_on_multiples_and_end_before_the_last_step():
    dispatcher = make(4)
    assert [dispatcher.n_next(at, 10) for at in range(9)] == [4, 1, 1, 1, 4, 1, 1, 1, 4]
    assert [dispatcher.n_next(8, left) for left in (5, 4, 3, 0)] == [4, 4, 1, 1]
    assert make().n_next(8, 100) == 1


def test_grouped_steps_compute_what_single_steps_compute():
    batches = [np.full(3, i, np.float32) for i in range(4)]
    alone = [jnp.zeros(()), jnp.zeros((), jnp.int32)]
    for batch in batches:
        alone, outputs = make(1).one(alone, batch)
    run, stacked = make(4).program(batches)
    together, last = run([jnp.zeros(()), jnp.zeros((), jnp.int32)], stacked)
    assert_trees_equal(together, alone)
    assert_trees_equal(last, outputs)


def test_numpy_batches_are_stacked_in_aligned_memory():
    for dtype in (np.float32, np.int32, np.uint8, bool):
        _, stacked = make(3).program([np.full((2, 5), i, dtype) for i in range(3)])
        assert stacked.ctypes.data % 64 == 0
        np.testing.assert_array_equal(stacked[:, 0, 0], np.arange(3).astype(dtype))


@pytest.mark.parametrize(("n_run", "n"), [(100, 11), (1000, 9), (50, 16), (10, 9), (9, 8)])
def test_the_group_size_leaves_as_few_single_steps_as_possible(clock, n_run, n):
    dispatcher = make(jit=clock.jit_with({"step": 1e-3, "many": 1e-3}))
    leaves = [jnp.zeros(()), jnp.zeros((), jnp.int32)]
    dispatcher.choose(leaves, np.ones(3, np.float32), n_run)
    assert dispatcher.steps_per_dispatch == n


def test_the_time_of_measuring_depends_on_numbers_of_steps_alone(early):
    dispatcher = make()
    due = [dispatcher.is_choice_due(*at) for at in ((19, 19), (20, 8), (20, 9), (5000, 1))]
    assert due == [False, False, True, False]
    assert not make(1).is_choice_due(5000, 100)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only running programs advance, and a jit that makes them do so."""
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
def test_the_faster_choice_is_adopted_and_reported(clock, one, many, n):
    dispatcher = make(jit=clock.jit_with({"step": one, "many": many}))
    leaves = [jnp.zeros(()), jnp.zeros((), jnp.int32)]
    line = dispatcher.choose(leaves, np.ones(3, np.float32), 9)
    assert dispatcher.steps_per_dispatch == n
    assert line.startswith(f"Running {n} step")
    assert float(leaves[0]) == 0.0  # Measured on copies.


def test_long_steps_compile_no_second_program(clock):
    dispatcher = make(jit=clock.jit_with({"step": 2e-3, "many": 0.0}))
    dispatcher.choose([jnp.zeros(()), jnp.zeros((), jnp.int32)], np.ones(3, np.float32), 9)
    assert set(clock.ran) == {"step"}


def test_convolutions_on_cpu_are_not_measured(clock):
    @jax.jit
    def convolved(batch):
        return jax.lax.conv(batch[None, None, :], jnp.ones((1, 1, 2)), (1,), "SAME").sum()

    def step(leaves, batch):
        return [leaves[0] + convolved(batch)], [batch.sum()]

    seconds = {"step": 1e-3, "many": 0.0}
    dispatcher = Dispatcher(step, many, steps_per_dispatch="auto", jit=clock.jit_with(seconds))
    line = dispatcher.choose([jnp.zeros(())], np.ones(3, np.float32), 9)
    assert dispatcher.steps_per_dispatch == 1
    assert clock.ran == []
    assert "convolutions" in line


def test_the_choice_is_made_at_the_same_step_and_is_saved(line, early, capsys):
    def choices():
        loop = line.loop(n_steps=60, n_steps_per_checkpoint=10, stdout=True)
        return {c.step: c.facts["steps_per_dispatch"] for c in loop}

    first, second = choices(), choices()
    for facts in (first, second):
        assert [step for step, choice in facts.items() if choice is None] == [10]
        assert len({choice for step, choice in facts.items() if step >= 20}) == 1
    n_changes = sum(facts[60] > 1 for facts in (first, second))
    assert capsys.readouterr().out.count("per dispatch") == n_changes


def test_only_a_change_is_printed(line, early, monkeypatch, capsys):
    for n in (1, 4):

        def choose(self, *args, n=n):
            self.steps_per_dispatch = n
            return f"{n} per dispatch"

        monkeypatch.setattr(Dispatcher, "choose", choose)
        list(line.loop(n_steps=40, n_steps_per_checkpoint=10, stdout=True))
        assert ("per dispatch" in capsys.readouterr().out) == (n > 1)


def test_measuring_does_not_affect_training(line, early):
    alone = list(line.loop(n_steps=30, n_steps_per_checkpoint=10, steps_per_dispatch=1))[-1]
    measured = list(line.loop(n_steps=30, n_steps_per_checkpoint=10))[-1]
    for a, b in zip(
        jax.tree.leaves(measured.model_params), jax.tree.leaves(alone.model_params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert measured.data_state == alone.data_state


def test_a_function_whose_first_call_was_interrupted_runs_as_fast_as_any():
    n_traces, n_python_calls = [], []

    def interrupted_once(x):
        n_traces.append(1)
        if len(n_traces) == 1:
            raise KeyboardInterrupt
        return x + 1

    run = jax.jit(interrupted_once)
    with pytest.raises(KeyboardInterrupt), dispatch.compiling(run):
        run(jnp.zeros(3))
    x = run(jnp.zeros(3))
    sys.setprofile(lambda _, event, __: n_python_calls.append(event == "call"))
    try:
        run(x)
    finally:
        sys.setprofile(None)
    assert sum(n_python_calls) < 3  # JAX's own functions would be a hundred.
