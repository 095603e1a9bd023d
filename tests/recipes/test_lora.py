import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.core import trees
from tekoa.recipes import lora
from tekoa.testing import assert_trees_equal

pytestmark = pytest.mark.slow


def test_the_base_does_not_change_and_has_no_optimizer_state(model, toy):
    """After a hundred steps of the loop."""
    data = toy.data() * 9
    loop = toy.loop(
        tekoa.lora(model, rank=2),
        optax.adam(0.01),
        n_steps=100,
        data=data,
        ema=0.9,
        grads=True,
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
def test_the_recipe_adapts_and_reports(capsys):
    curves = lora.run(n_steps=100)
    for losses in curves.lines.values():
        assert losses[-1] < losses[0] / 2
    lines = capsys.readouterr().out.splitlines()
    accuracies = [line.split()[-1] for line in lines if "accuracy" in line]
    assert len(accuracies) == 6
    for i in (0, 3):  # Linen and NNX.
        assert accuracies[i] == accuracies[i + 1] == accuracies[i + 2]
