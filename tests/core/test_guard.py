import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import guard
from tekoa.core.step import init_state, make_train_step
from tekoa.testing import assert_trees_equal

PARAMS = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
FNS = model_fns(PARAMS, lambda p, x: jnp.sum(p["a"] * x[0]) + jnp.sum(jnp.sqrt(p["b"] * x[1])))
GOOD = (np.ones((2, 2), np.float32), ())
# The root of zero is zero, its slope is not finite: the loss stays fine, one gradient goes bad.
BAD_GRADIENT = (np.float32([[1, 1], [0, 1]]), ())
BAD_LOSS = (np.float32([[np.nan, 1], [1, 1]]), ())


def run(batches, on_nan, tx=None):
    tx = tx or optax.adam(0.01)
    state = init_state(FNS, tx, jax.random.key(0), inputs=(GOOD[0],), ema=0.5)
    step = jax.jit(make_train_step(FNS, None, tx, on_nan=on_nan, ema=0.5))
    for batch in batches:
        state, _ = step(state, batch)
    return state


def parts(state):
    return state.params, state.opt_state, state.average


def test_stop_keeps_the_state_of_the_last_good_step_ever_after():
    good, stopped = run([GOOD], "stop"), run([GOOD, BAD_GRADIENT, GOOD, GOOD], "stop")
    assert_trees_equal(parts(stopped), parts(good))
    assert int(stopped.step) == 1


def test_skip_leaves_out_the_update_and_counts_the_step():
    good, skipped = run([GOOD, GOOD], "skip"), run([GOOD, BAD_LOSS, BAD_LOSS, GOOD], "skip")
    assert_trees_equal(parts(skipped), parts(good))
    assert (int(skipped.step), int(skipped.health.n_bad)) == (4, 2)


def test_ignore_goes_on_with_what_comes():
    assert np.isnan(run([BAD_LOSS], "ignore").params["a"]).any()


def test_the_leaf_of_a_bad_gradient_is_named():
    said = guard.diagnosis(run([GOOD, BAD_GRADIENT, BAD_LOSS], "skip"))
    assert said == "At step 2 the gradient of 'b' was the first that was not finite."


def test_a_bad_loss_is_told_with_its_gradient():
    said = guard.diagnosis(run([BAD_LOSS], "stop"))
    assert said.startswith("At step 1 the loss was nan and the gradient of 'a'")


def test_an_update_that_spoils_parameters_is_not_kept():
    # Finite gradients, an optimizer that makes infinity of them.
    tx = optax.stateless(lambda u, _: {"a": u["a"], "b": u["b"] * jnp.inf})
    state = run([GOOD, GOOD], "stop", tx)
    np.testing.assert_array_equal(state.params["b"], PARAMS["b"])
    assert guard.diagnosis(state) == (
        "At step 1 the update of 'b' was the first that was not finite."
    )


def test_all_well_says_nothing():
    assert guard.diagnosis(run([GOOD], "stop")) == ""


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_guarded_step_equals_an_unguarded_one(on_nan):
    assert_trees_equal(parts(run([GOOD] * 3, on_nan)), parts(run([GOOD] * 3, "ignore")))
