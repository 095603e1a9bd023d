import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.core.state import StepOutput, TrainState, healthy
from tekoa.core.step import owned
from tekoa.loop.train import TrainLoop
from tekoa.loop.training import Options


class Counting:
    """A step of one's own: it adds up what it is given, and remembers the largest."""

    tells = ("weights_l2norm",)

    def __init__(self, data):
        self.data = data

    def split(self, batch):
        return (batch,), ()

    def axes(self, rng, batch):
        return {}

    def init(self, rng, batch, options):
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params={"total": jnp.zeros(())},
            variables={},
            opt_state=(),
            average=None,
            carry=None,
            rng=jnp.zeros(2, jnp.uint32),
            sums={"largest": self.empty(None)["largest"]},
            health=healthy(),
        )
        return jax.tree.map(owned, state)

    def make_step(self, options, *, keep_grads=False):
        def step(state, batch):
            total = state.params["total"] + batch.sum()
            largest = jnp.maximum(state.sums["largest"], batch.max())
            new = state.replace(
                step=state.step + 1, params={"total": total}, sums={"largest": largest}
            )
            nan = jnp.full((), jnp.nan)
            return new, StepOutput(loss=nan, gradients_l2norm=nan, weights_l2norm=jnp.abs(total))

        return step

    def make_steps(self, options):
        step = self.make_step(options)

        def many(state, batches):
            state, outputs = jax.lax.scan(step, state, batches)
            return state, jax.tree.map(lambda x: x[-1], outputs)

        return many

    def empty(self, sums):
        return {"largest": jnp.full((), -jnp.inf)}

    def compute(self, sums):
        return {"largest": float(sums["largest"])}


@pytest.mark.parametrize("together", [1, 2])
def test_a_task_may_bring_its_own_step_and_metrics(together):
    data = [np.float32([i, 1]) for i in range(10)]
    loop = TrainLoop(
        None,
        Counting(data),
        n_steps=10,
        n_steps_per_checkpoint=4,
        grads=False,
        steps_per_dispatch=together,
    )
    found = list(loop)
    assert [c.step for c in found] == [4, 8, 10]
    assert [c.metrics["train"]["largest"] for c in found] == [3, 7, 9]
    assert [float(c.state.params["total"]) for c in found] == [10, 36, 55]
    assert "loss" not in found[0].metrics["train"]
    assert found[-1].metrics["train"]["weights_l2norm"] == 55
    with pytest.raises(TypeError, match="knows no model"):
        _ = loop.model_fns
    assert float(loop.model["total"]) == 55


def test_a_model_task_trains_as_its_step_does(line):
    loop = line.loop(n_steps=4, tx=optax.sgd(0.1), steps_per_dispatch=1)
    training = loop._training
    batch = line.data(4)[0]
    state = training.init(jax.random.key(1), batch, Options())
    step = jax.jit(training.make_step(Options()))
    for batch in line.data(4):
        state, _ = step(state, batch)
    (checkpoint,) = loop
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(checkpoint.state.params)):
        np.testing.assert_allclose(a, b, rtol=1e-6)
