import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.loop.flat import Form
from tekoa.testing import assert_trees_equal

X = np.ones((4, 2), np.float32)
FNS = model_fns(
    lambda rng, x: (jnp.ones(2), {"streams": {"key": jax.random.key(3, impl="rbg")}}),
    lambda p, x, variables: (x @ p, {}),
)
TX = optax.adam(0.1)


def state():
    return steps.init_state(FNS, TX, jax.random.key(0), inputs=(X,), ema=0.5)


def test_a_state_comes_back_as_it_was_keys_of_all_kinds_included():
    before = state()
    form = Form(before)
    leaves = form.leaves(before)
    assert not any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves)
    after = form.state(leaves)
    assert_trees_equal(after, before)
    assert after.variables["streams"]["key"].dtype == before.variables["streams"]["key"].dtype


def test_a_flat_step_is_the_step():
    step = steps.make_train_step(FNS, lambda o, y: jnp.mean(o**2), TX, keep_grads=True, ema=0.5)
    form = Form(state())
    new, output = step(state(), (X, X))
    leaves, outputs = form.step(step)(form.leaves(state()), (X, X))
    assert_trees_equal(form.state(leaves), new)
    assert_trees_equal(form.output(outputs), output)


def test_without_gradients_there_are_none():
    step = steps.make_train_step(FNS, lambda o, y: jnp.mean(o**2), TX, ema=0.5)
    form = Form(state())
    _, outputs = form.step(step)(form.leaves(state()), (X, X))
    assert form.output(outputs).grads is None


def test_a_lean_step_tells_its_loss_alone():
    step = steps.make_train_step(FNS, lambda o, y: jnp.mean(o**2), TX, ema=0.5)
    form = Form(state())
    new, output = step(state(), (X, X))
    leaves, outputs = form.lean(step)(form.leaves(state()), (X, X))
    assert_trees_equal(form.state(leaves), new)
    assert form.output(outputs).gradients_l2norm is None
    assert float(form.output(outputs).loss) == float(output.loss)
