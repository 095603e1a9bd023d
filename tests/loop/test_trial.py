import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.loop.trial import Trial

# A state of two arrays: a number, and how many bad batches the steps have met.


def free(leaves, batch):
    value, n_bad = leaves
    return [value + batch, n_bad + jnp.int32(not np.isfinite(batch))], [value]


def guarded(leaves, batch):
    new, outputs = free(leaves, batch)
    return (new if np.isfinite(batch) else [leaves[0], new[1]]), outputs


def is_fine(before, after):
    return before[1] == after[1]


def start():
    return [jnp.float32(0), jnp.int32(0)]


def run(trial, leaves, batches, *, is_held=False):
    for batch in batches:
        trial.add(leaves, batch, is_held=is_held)
        leaves, _ = free(leaves, batch)
    return leaves


@pytest.fixture
def trial():
    return Trial(free, guarded, is_fine)


def test_steps_that_met_nothing_bad_are_left_alone(trial):
    assert trial.settled(run(trial, start(), [1.0, 2.0])) is None


def test_steps_that_met_something_bad_run_again_with_a_guard(trial):
    leaves = run(trial, start(), [1.0, np.nan, 4.0])
    for _ in range(2):  # An interrupt may come before what it gave was stored.
        (value, n_bad), outputs = trial.settled(leaves)
        assert (float(value), int(n_bad), float(outputs[0])) == (5.0, 1, 1.0)


def test_what_was_settled_is_forgotten(trial):
    trial.settled(run(trial, start(), [np.inf]))
    trial.close()
    leaves = run(trial, [jnp.float32(7), jnp.int32(1)], [2.0])
    assert trial.settled(leaves) is None
    trial.close()
    (value, _), _ = trial.settled(run(trial, leaves, [np.nan, 1.0]))
    assert float(value) == 10.0


@pytest.mark.parametrize(
    ("batch", "n_most"), [(1.0, 64), (np.zeros(2**22, np.float32), 4), (np.zeros(2**25), 1)]
)
def test_it_is_due_after_a_bounded_number_of_batches_and_bytes(trial, batch, n_most):
    leaves = start()
    for _ in range(2):
        for n_run in range(1, n_most + 1):
            trial.add(leaves, batch, is_held=True)
            assert trial.is_due == (n_run == n_most)
        trial.close()
        assert not trial.is_due


def test_the_copy_of_before_takes_over_the_memory_of_the_last_one(trial):
    leaves = start()
    copies = []
    for _ in range(3):
        leaves = run(trial, leaves, [1.0])
        copies.append(trial._before)
        trial.close()
    assert all(x.is_deleted() for copy in copies[:2] for x in copy)
    assert not any(x.is_deleted() for x in [*copies[2], *leaves])


def test_a_state_that_stays_is_not_copied(trial):
    leaves = start()
    run(trial, leaves, [1.0], is_held=True)
    assert trial._before is leaves
