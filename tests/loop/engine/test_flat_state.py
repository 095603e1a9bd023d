import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.loop.engine.flat_state import StateCodec
from tekoa.testing import assert_trees_equal

X = np.ones((4, 2), np.float32)
FNS = model_fns(
    lambda rng, x: (jnp.ones(2), {"streams": {"key": jax.random.key(3, impl="rbg")}}),
    lambda p, x, variables: (x @ p, {}),
)
TX = optax.adam(0.1)


def state():
    return steps.init_state(FNS, TX, jax.random.key(0), inputs=(X,), ema=0.5)


def test_a_round_trip_preserves_the_state_and_keys_of_every_kind():
    before = state()
    codec = StateCodec(before)
    leaves = codec.flatten(before)
    assert not any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves)
    after = codec.unflatten(leaves)
    assert_trees_equal(after, before)
    assert after.variables["streams"]["key"].dtype == before.variables["streams"]["key"].dtype


def test_a_flat_step_computes_what_the_step_computes():
    step = steps.make_train_step(FNS, lambda o, y: jnp.mean(o**2), TX, keep_grads=True, ema=0.5)
    codec = StateCodec(state())
    new, output = step(state(), (X, X))
    leaves, outputs = codec.flat_step(step)(codec.flatten(state()), (X, X))
    assert_trees_equal(codec.unflatten(leaves), new)
    assert_trees_equal(codec.unflatten_output(outputs), output)


def test_single_parts_of_the_list_are_read_and_replaced():
    before = state().replace(sums={"loss": jnp.ones(()), "accuracy": jnp.ones(())})
    before = before.replace(health=before.health._replace(n_bad=jnp.int32(7)))
    codec = StateCodec(before)
    leaves = codec.flatten(before)
    assert int(codec.n_bad(leaves)) == 7
    sums = {"loss": jnp.zeros(()), "accuracy": jnp.full((), 5.0)}
    after = codec.unflatten(codec.with_sums(leaves, sums))
    assert_trees_equal(after, before.replace(sums=sums))
    assert_trees_equal(codec.unflatten(leaves), before)


def test_grads_are_none_unless_the_step_keeps_them():
    step = steps.make_train_step(FNS, lambda o, y: jnp.mean(o**2), TX, ema=0.5)
    codec = StateCodec(state())
    _, outputs = codec.flat_step(step)(codec.flatten(state()), (X, X))
    assert codec.unflatten_output(outputs).grads is None


def test_a_loss_only_step_returns_no_norms():
    step = steps.make_train_step(FNS, lambda o, y: jnp.mean(o**2), TX, ema=0.5)
    codec = StateCodec(state())
    new, output = step(state(), (X, X))
    leaves, outputs = codec.flat_step(step, loss_only=True)(codec.flatten(state()), (X, X))
    assert_trees_equal(codec.unflatten(leaves), new)
    assert codec.unflatten_output(outputs).gradients_l2norm is None
    assert float(codec.unflatten_output(outputs).loss) == float(output.loss)
