import jax
import jax.numpy as jnp

from tekoa.core.state import Health, StepOutput, TrainState


def make(**changes):
    fields = dict.fromkeys(
        ("params", "variables", "opt_state", "average", "carry", "rng"), None
    ) | {"step": jnp.zeros((), jnp.int32), "sums": {}, "health": Health.zero()}
    return TrainState(**{**fields, **changes})


def test_evaluation_uses_the_average_if_there_is_one():
    assert make(params=1.0).eval_params == 1.0
    assert make(params=1.0, average=2.0).eval_params == 2.0


def test_states_are_pytrees_and_replace_returns_a_copy():
    state = make(params={"w": jnp.ones(2)})
    doubled = jax.jit(lambda s: s.replace(params=jax.tree.map(lambda x: 2 * x, s.params)))(state)
    assert float(doubled.params["w"].sum()) == 4.0
    assert float(state.params["w"].sum()) == 2.0


def test_outputs_are_pytrees():
    output = StepOutput(loss=1.0, gradients_l2norm=2.0, weights_l2norm=3.0)
    assert jax.tree.leaves(output) == [1.0, 2.0, 3.0]


def test_a_new_record_has_no_bad_step():
    assert [int(x) for x in Health.zero()] == [0, 0, 0, -1]
