import types

import jax.numpy as jnp

from tekoa.estimator.run import cadence
from tekoa.loop.checkpoint import Summary


def summary(step, n_steps, loss, norm=0.0):
    return Summary(
        state=None,
        step=step,
        loss=jnp.float32(loss),
        grads=None,
        n_completed_steps=n_steps,
        elapsed_time=float(n_steps),
        metrics={"train": {"loss": loss, "weights_l2norm": norm}, "rates": {"": norm}},
    )


def run(steps, **options):
    """Returns the steps checked and the steps copied, for a loop that yields at `steps`."""
    copied = []
    loop = [summary(step, step - before, 0.0) for before, step in zip([0, *steps], steps)]
    checked = cadence.checks(loop, save=copied.append, **options)
    return [summary.step for summary in checked], [summary.step for summary in copied]


def test_checks_and_copies_have_separate_intervals():
    steps = [2, 4, 6, 8, 10, 12, 14, 15]
    assert run(steps, check_every=10, save_every=4) == ([10, 15], [4, 8, 12])
    assert run([5, 10], check_every=5, save_every=10) == ([5, 10], [10])
    assert run([5, 7], check_every=5, save_every=None) == ([5, 7], [])


def test_metrics_cover_all_steps_since_the_previous_check():
    merged = cadence.merge([summary(2, 2, loss=1.0, norm=5.0), summary(5, 3, loss=6.0, norm=7.0)])
    assert (merged.step, merged.n_completed_steps, merged.elapsed_time) == (5, 5, 5.0)
    assert merged.metrics == {"train": {"loss": 4.0, "weights_l2norm": 7.0}, "rates": {"": 7.0}}
    only = types.SimpleNamespace()
    assert cadence.merge([only]) is only
