import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.core import trees
from tekoa.recipes import lora
from tekoa.testing import assert_trees_equal

pytestmark = pytest.mark.slow


def test_base_keeps_its_bits_and_has_no_optimizer_memory(model, toy):
    """A hundred steps through the loop."""
    data = toy.data() * 9
    loop = toy.loop(
        tekoa.lora(model, rank=2),
        optax.adam(0.01),
        n_steps=100,
        data=data,
        ema=0.9,
        n_steps_per_checkpoint=100,
    )
    before = jax.device_get(loop.state.variables["frozen"])
    first, last = loop.state.params, next(iter(loop)).model_params
    assert loop.step == 100
    assert_trees_equal(jax.device_get(loop.state.variables["frozen"]), before)
    assert not np.array_equal(first["out"]["kernel"]["lora_b"], last["out"]["kernel"]["lora_b"])
    n_adapters = 2 * (4 + 8) + 2 * (8 + 2)
    assert trees.n_elements(loop.state.opt_state) == 2 * n_adapters + 1
    assert trees.n_elements(loop.state.average) == n_adapters
    grads = trees.flatten_named(loop.next_step().grads)
    assert all("lora_" in name for name in grads)


@pytest.mark.slow
def test_recipe_adapts_and_tells(capsys):
    curves = lora.run(n_steps=100)
    for losses in curves.lines.values():
        assert losses[-1] < losses[0] / 2
    told = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "of " in line]
    assert told[0] == told[1]
