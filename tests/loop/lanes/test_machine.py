"""How lanes share a program."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tekoa.loop.lanes import constants, machine
from tekoa.testing import count_compilations


def make_step(k):
    def step(leaves, batch):
        return [leaves[0] * k + batch["x"]], [leaves[0].sum()]

    return step


@pytest.mark.parametrize("how", ["vmap", "turn"])
def test_each_lane_sees_its_own_number_state_and_stream(how):
    numbers, states = (2.0, 3.0, 5.0), [[jnp.full(2, float(i))] for i in range(3)]
    batches = [{"x": np.full(2, 10.0, np.float32)}, {"x": np.full(2, 20.0, np.float32)}]
    programs = [constants.trace(make_step(k), states[0], batches[0]) for k in numbers]
    run = machine.Machine(programs, programs, how).run
    results, outputs = run(
        machine.load(states, how),
        batches,
        streams=np.array([0, 1, 0]),
        is_active=np.array([True, True, how == "vmap"]),
        is_last=True,
    )
    leaves, losses = machine.unload(results, 3, how), machine.unload(outputs, 3, how)
    assert [float(leaves[i][0][0]) for i in (0, 1)] == [0 * 2 + 10, 1 * 3 + 20]
    assert [float(losses[i][0]) for i in (0, 1)] == [0, 2]


@pytest.mark.parametrize(("is_convolved", "n_programs"), [(False, 1), (True, 2)])
def test_one_program_runs_ordinary_and_last_steps(is_convolved, n_programs):
    """Convolutions on CPU are slow in a branch, so they have two."""
    kernel = np.array([[[2.0]]], np.float32)

    def make_last(k):
        def last(leaves, batch):
            x = leaves[0][None, None]
            doubled = lax.conv(x, kernel, (1,), "SAME")[0, 0] if is_convolved else 2 * leaves[0]
            return [doubled - k], [leaves[0].sum(), leaves[0] * k]

        return last

    batches, states = [{"x": np.ones(2, np.float32)}], [[jnp.ones(2)], [jnp.ones(2)]]
    steps = [constants.trace(make_step(k), states[0], batches[0]) for k in (2.0, 3.0)]
    last_steps = [constants.trace(make_last(k), states[0], batches[0]) for k in (5.0, 7.0)]
    run = machine.Machine(steps, last_steps, "turn").run
    options = {"streams": np.array([0, 0]), "is_active": np.array([True, True])}
    loaded = machine.load(states, "turn")
    with count_compilations() as compiled:
        loaded, outputs = run(loaded, batches, is_last=False, **options)
        assert [len(own) for own in outputs] == [1, 1]
        loaded, outputs = run(loaded, batches, is_last=True, **options)
    assert compiled.total == n_programs
    assert [float(leaves[0][0]) for leaves in loaded] == [2 * (2 + 1) - 5, 2 * (3 + 1) - 7]
    assert [float(own[1][0]) for own in outputs] == [3 * 5, 4 * 7]


def test_lanes_run_in_turn_on_cpu():
    assert machine.choose_how("auto") == "turn"
    assert machine.choose_how("vmap") == "vmap"
