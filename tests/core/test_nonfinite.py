import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import nonfinite
from tekoa.core.step import init_state, make_train_step
from tekoa.testing import assert_trees_equal

PARAMS = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
FNS = model_fns(PARAMS, lambda p, x: jnp.sum(p["a"] * x[0]) + jnp.sum(jnp.sqrt(p["b"] * x[1])))
GOOD = (np.ones((2, 2), np.float32), ())
# The square root has an infinite slope at zero: the loss is finite, one gradient is not.
BAD_GRADIENT = (np.float32([[1, 1], [0, 1]]), ())
BAD_LOSS = (np.float32([[np.nan, 1], [1, 1]]), ())


def run(batches, on_nan, tx=None):
    tx = tx or optax.adam(0.01)
    state = init_state(FNS, tx, jax.random.key(0), inputs=(GOOD[0],), ema=0.5)
    step = jax.jit(make_train_step(FNS, None, tx, on_nan=on_nan, ema=0.5))
    for batch in batches:
        state, _ = step(state, batch)
    return state


def trained(state):
    return state.params, state.opt_state, state.average


def test_stop_keeps_the_state_of_the_last_good_step_for_all_later_steps():
    good, stopped = run([GOOD], "stop"), run([GOOD, BAD_GRADIENT, GOOD, GOOD], "stop")
    assert_trees_equal(trained(stopped), trained(good))
    assert int(stopped.step) == 1


def test_skip_omits_the_update_and_counts_the_step():
    good, skipped = run([GOOD, GOOD], "skip"), run([GOOD, BAD_LOSS, BAD_LOSS, GOOD], "skip")
    assert_trees_equal(trained(skipped), trained(good))
    assert (int(skipped.step), int(skipped.health.n_bad)) == (4, 2)


def test_ignore_applies_the_update():
    assert np.isnan(run([BAD_LOSS], "ignore").params["a"]).any()


def test_the_first_bad_gradient_is_named():
    text = nonfinite.diagnosis(run([GOOD, BAD_GRADIENT, BAD_LOSS], "skip"))
    assert text == "At step 2 the gradient of 'b' was the first with NaN or Inf."


def test_a_bad_loss_is_reported_with_its_gradient():
    text = nonfinite.diagnosis(run([BAD_LOSS], "stop"))
    assert text.startswith("At step 1 the loss was nan and the gradient of 'a'")


def test_an_update_with_infinite_parameters_is_discarded():
    # Finite gradients, infinite updates.
    tx = optax.stateless(lambda u, _: {"a": u["a"], "b": u["b"] * jnp.inf})
    state = run([GOOD, GOOD], "stop", tx)
    np.testing.assert_array_equal(state.params["b"], PARAMS["b"])
    assert nonfinite.diagnosis(state) == (
        "At step 1 the update of 'b' was the first with NaN or Inf."
    )


def test_the_diagnosis_of_finite_steps_is_empty():
    assert nonfinite.diagnosis(run([GOOD], "stop")) == ""


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_guarded_step_equals_an_unguarded_one(on_nan):
    assert_trees_equal(trained(run([GOOD] * 3, on_nan)), trained(run([GOOD] * 3, "ignore")))
