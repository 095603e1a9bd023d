import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import guard
from tekoa.core.sequence import make_train_steps
from tekoa.core.step import init_state, make_train_step

PARAMS = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
FNS = model_fns(PARAMS, lambda p, x: jnp.sum(p["a"] * x[0]) + jnp.sum(jnp.sqrt(p["b"] * x[1])))
GOOD = (np.ones((2, 2), np.float32), ())
# The root of zero is zero, its slope is not finite: the loss stays fine, one gradient goes bad.
BAD_GRADIENT = (np.float32([[1, 1], [0, 1]]), ())
BAD_LOSS = (np.float32([[np.nan, 1], [1, 1]]), ())
# Finite gradients, of which an optimizer may make infinity.
LARGE = (np.float32([[1e9, 1], [1, 1]]), ())
CASES = {
    "all good": [GOOD] * 4,
    "a bad gradient": [GOOD, BAD_GRADIENT, GOOD, GOOD],
    "a bad loss": [GOOD, GOOD, GOOD, BAD_LOSS],
    "a bad update": [GOOD, GOOD, LARGE, GOOD],
    "bad from the start": [BAD_LOSS, BAD_GRADIENT, GOOD, BAD_LOSS],
}
# Forgets its past, so that nothing but the parameters can stay bad.
OVERFLOWS = optax.stateless(lambda u, _: jax.tree.map(lambda g: -0.1 * g**5, u))


def run(batches, on_nan, *, n_together, tx=OVERFLOWS):
    state = init_state(FNS, tx, jax.random.key(0), inputs=(GOOD[0],), ema=0.5)
    options = {"on_nan": on_nan, "ema": 0.5}
    one = jax.jit(make_train_step(FNS, None, tx, **options))
    many = jax.jit(make_train_steps(FNS, None, tx, **options))
    output = None
    for i in range(0, len(batches), n_together):
        group = batches[i : i + n_together]
        if n_together == 1:
            state, output = one(state, group[0])
        else:
            state, output = many(state, jax.tree.map(lambda *x: np.stack(x), *group))
    return state, output


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("on_nan", ["stop", "skip", "ignore"])
def test_several_steps_do_what_they_do_one_by_one(case, on_nan):
    # What follows a bad group is run too: "stop" must stay where it was.
    batches = CASES[case] + [GOOD] * 4
    (alone, a), (together, b) = (run(batches, on_nan, n_together=n) for n in (1, 4))
    parts = [(s.params, s.average, s.step, s.health) for s in (alone, together)]
    assert_close(*parts)
    assert guard.diagnosis(alone) == guard.diagnosis(together)
    assert_close(a.loss, b.loss)


def test_the_slots_of_a_skipped_step_stay_as_they_were():
    tx = optax.adam(0.01)
    good, _ = run([GOOD] * 3, "skip", n_together=1, tx=tx)
    skipped, _ = run(CASES["a bad gradient"], "skip", n_together=4, tx=tx)
    assert_close((good.params, good.opt_state), (skipped.params, skipped.opt_state))
