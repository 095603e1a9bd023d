import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.loop.engine.rollback import Rollback

# A state of two arrays: a number, and how many bad batches the steps have met.


def step(leaves, batch):
    value, n_bad = leaves
    return [value + batch, n_bad + jnp.int32(not np.isfinite(batch))], [value]


def guarded_step(leaves, batch):
    new, outputs = step(leaves, batch)
    return (new if np.isfinite(batch) else [leaves[0], new[1]]), outputs


def two_steps(leaves, batches):
    leaves, _ = step(leaves, batches[0])
    return step(leaves, batches[1])


def two_guarded_steps(leaves, batches):
    leaves, _ = guarded_step(leaves, batches[0])
    return guarded_step(leaves, batches[1])


def all_finite_since(before, after):
    return before[1] == after[1] and bool(np.isfinite(after[0]))


def same_count(before, after):
    return int(before[1]) == int(after[1])


def start():
    return [jnp.float32(0), jnp.int32(0)]


def run(rollback, leaves, batches, *, is_held=False):
    for batch in batches:
        program = two_steps if isinstance(batch, tuple) else step
        rollback.add(program, leaves, batch, is_held=is_held)
        leaves, _ = program(leaves, batch)
    return leaves


@pytest.fixture
def rollback():
    guarded = {
        step: guarded_step,
        two_steps: two_guarded_steps,
        guarded_step: guarded_step,
    }
    return Rollback(guarded, all_finite_since, same_count)


def verify(rollback, leaves, *, all_ran=True):
    return rollback.verify(leaves, all_ran=all_ran)


def test_finite_steps_are_not_replayed(rollback):
    assert verify(rollback, run(rollback, start(), [1.0, 2.0])) is None


@pytest.mark.parametrize("value", [1.0, np.inf])
@pytest.mark.parametrize("all_ran", [True, False])
def test_parameters_are_checked_unless_a_guarded_step_has_done_so(rollback, value, all_ran):
    leaves = [jnp.float32(value), jnp.int32(0)]
    rollback.add(guarded_step, start(), 1.0, is_held=True)
    is_replayed = verify(rollback, leaves, all_ran=all_ran) is not None
    assert is_replayed == (not all_ran and not np.isfinite(value))


def test_steps_before_a_guarded_one_are_replayed_with_it(rollback):
    leaves = run(rollback, start(), [1.0, np.nan])
    rollback.add(guarded_step, leaves, 4.0, is_held=False)
    leaves, _ = guarded_step(leaves, 4.0)
    (value, n_bad), outputs = verify(rollback, leaves)
    assert (float(value), int(n_bad), float(outputs[0])) == (5.0, 1, 1.0)


def test_steps_that_met_nan_are_replayed_with_a_guard(rollback):
    leaves = run(rollback, start(), [1.0, np.nan, 4.0])
    for _ in range(2):  # An interrupt may come before the result is stored.
        (value, n_bad), outputs = verify(rollback, leaves)
        assert (float(value), int(n_bad), float(outputs[0])) == (5.0, 1, 1.0)


def test_single_and_grouped_steps_are_replayed_in_order(rollback):
    leaves = run(rollback, start(), [1.0, (np.inf, 2.0), 4.0, (8.0, 16.0)])
    (value, n_bad), outputs = verify(rollback, leaves)
    assert (float(value), int(n_bad), float(outputs[0])) == (31.0, 1, 15.0)


def test_only_dispatches_that_met_nan_run_guarded():
    runs = []

    def guard(leaves, batch):
        runs.append(batch)
        return guarded_step(leaves, batch)

    rollback = Rollback({step: guard}, all_finite_since, same_count)
    verify(rollback, run(rollback, start(), [1.0, np.inf, 4.0]))
    assert runs == [np.inf]


def test_closed_steps_are_forgotten(rollback):
    verify(rollback, run(rollback, start(), [np.inf]))
    rollback.close()
    leaves = run(rollback, [jnp.float32(7), jnp.int32(1)], [2.0])
    assert verify(rollback, leaves) is None
    rollback.close()
    (value, _), _ = verify(rollback, run(rollback, leaves, [np.nan, 1.0]))
    assert float(value) == 10.0


@pytest.mark.parametrize(
    ("batch", "n_most"), [(1.0, 64), (np.zeros(2**22, np.float32), 4), (np.zeros(2**25), 1)]
)
def test_verification_is_due_after_a_bounded_number_of_batches_and_bytes(rollback, batch, n_most):
    leaves = start()
    for _ in range(2):
        for n_run in range(1, n_most + 1):
            rollback.add(step, leaves, batch, is_held=True)
            assert rollback.is_due == (n_run == n_most)
        rollback.close()
        assert not rollback.is_due


def test_the_bytes_of_single_and_grouped_steps_add_up(rollback):
    small, large = np.zeros(2**22, np.float32), np.zeros(3 * 2**22, np.float32)
    rollback.add(step, start(), small, is_held=True)
    assert not rollback.is_due
    rollback.add(two_steps, start(), large, is_held=True)
    assert rollback.is_due


def test_the_copy_of_the_state_reuses_the_memory_of_the_previous_copy(rollback):
    leaves = start()
    copies = []
    for _ in range(3):
        leaves = run(rollback, leaves, [1.0])
        copies.append(rollback._before)
        rollback.close()
    assert all(x.is_deleted() for copy in copies[:2] for x in copy)
    assert not any(x.is_deleted() for x in [*copies[2], *leaves])


def test_a_state_that_stays_valid_is_not_copied(rollback):
    leaves = start()
    run(rollback, leaves, [1.0], is_held=True)
    assert rollback._before is leaves


def test_an_interrupt_before_a_dispatch_is_recorded_leaves_nothing_to_replay(rollback, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    leaves = start()
    with monkeypatch.context() as patched:
        patched.setattr("tekoa.core.trees.n_bytes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rollback.add(step, leaves, jnp.float32(1), is_held=False)
    assert verify(rollback, leaves) is None
    leaves = run(rollback, [jnp.float32(5), jnp.int32(0)], [jnp.float32(np.nan), jnp.float32(1)])
    assert [float(x) for x in verify(rollback, leaves)[0]] == [6, 1]
