"""How lanes share a program."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tekoa.loop.lanes import constants, machine


def make_step(k):
    def step(leaves, batch):
        return [leaves[0] * k + batch["x"]], [leaves[0].sum()]

    return step


@pytest.mark.parametrize("how", ["map", "vmap", "turn"])
def test_each_lane_sees_its_own_number_state_and_stream(how):
    numbers, states = (2.0, 3.0, 5.0), [[jnp.full(2, float(i))] for i in range(3)]
    batches = [{"x": np.full(2, 10.0, np.float32)}, {"x": np.full(2, 20.0, np.float32)}]
    programs = [constants.trace(make_step(k), states[0], batches[0]) for k in numbers]
    run = machine.Machine(programs, how).run
    loaded = machine.load(states, how)
    results, outputs = run(
        loaded,
        batches,
        streams=np.array([0, 1, 0]),
        is_active=np.array([True, True, how == "vmap"]),
    )
    leaves, losses = machine.unload(results, 3, how), machine.unload(outputs, 3, how)
    assert [float(leaves[i][0][0]) for i in (0, 1)] == [0 * 2 + 10, 1 * 3 + 20]
    assert [float(losses[i][0]) for i in (0, 1)] == [0, 2]


def test_convolutions_on_cpu_are_called_in_turn():
    image = jnp.ones((1, 1, 4, 4))
    convolved = constants.trace(lambda x: lax.conv(x, x[:, :, :2, :2], (1, 1), "SAME"), image)
    assert machine.choose_how("auto", convolved) == "turn"
    assert machine.choose_how("auto", constants.trace(jnp.sin, image)) == "map"
    assert machine.choose_how("vmap", convolved) == "vmap"
