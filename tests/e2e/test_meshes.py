"""A small transformer on meshes of 8 devices: the same losses, the promised memory."""

import functools

import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.core import trees
from tekoa.models import text, transformer_lm
from tekoa.sharding import specs as specs_lib
from tekoa.testing import count_compilations

pytestmark = pytest.mark.slow

V, ROWS, LENGTH = 32, 8, 8
SPLIT = functools.partial(transformer_lm.model_inputs, start_id=0)


def tokens(n):
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, V, (ROWS, LENGTH))} for _ in range(n)]


def make_loop(n_steps, layout=None, optimizer=None, **options):
    model = transformer_lm.TransformerLM(
        V, n_layers=1, width=16, n_heads=4, mlp_width=32, dropout=0.1
    )
    task = tekoa.TrainTask(
        optimizer=optimizer or optax.adam(1e-2),
        data=tokens(n_steps),
        loss=text.token_loss,
        split=lambda batch: ((SPLIT(batch),), (batch,)),
    )
    options = {"n_steps": n_steps, "n_steps_per_checkpoint": 5, "grads": False, **options}
    return tekoa.TrainLoop(options.pop("init", model), task, layout=layout, **options)


@functools.cache
def losses_on_one_device(n_steps=50):
    return [float(checkpoint.loss) for checkpoint in make_loop(n_steps)]


def layout_of(**sizes):
    return tekoa.Layout(
        mesh=tekoa.make_mesh(**sizes), logical_axis_rules=transformer_lm.LOGICAL_AXIS_RULES
    )


def n_bytes_on_a_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="data", marks=pytest.mark.slow),
        pytest.param({"fsdp": 8}, id="fsdp", marks=pytest.mark.slow),
        pytest.param({"model": 4}, id="tensor", marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "model": 2}, id="mixed"),
    ],
)
def test_losses_are_those_of_one_device(sizes):
    layout = layout_of(**sizes)
    with count_compilations() as compiled:
        loop = make_loop(50, layout)
        found = [float(checkpoint.loss) for checkpoint in loop]
    np.testing.assert_allclose(found, losses_on_one_device(), atol=1e-4)
    assert [name for name in compiled.names if "step" in name] == ["jit(step)"]
    specs = layout.tree_specs(loop.state.params, loop.model_fns.axes(*sample()))
    planned = sum(
        x.nbytes // specs_lib.n_parts(spec, layout.mesh.shape)
        for x, spec in zip(jax.tree.leaves(loop.state.params), jax.tree.leaves(specs), strict=True)
    )
    assert n_bytes_on_a_device(loop.state.params) == planned
    if sizes:
        assert planned < trees.n_bytes(loop.state.params) / 2


def sample():
    return jax.random.key(0), (np.zeros((ROWS, LENGTH), np.int32),)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "amos"])
def test_slots_split_over_the_data_axis_take_an_eighth(name):
    def optimizer():
        if name == "adam":
            return optax.adam(1e-2)
        reduced = lambda name, shape: (1, *shape[1:]) if len(shape) > 1 else ()
        return tekoa.amos(1e-2, lambda name, shape: 0.1, reduced)

    loops = {
        rules: make_loop(10, optimizer=optimizer(), devices=jax.devices(), optimizer_rules=rules)
        for rules in (None, "data")
    }
    found = {rules: [float(c.loss) for c in loop] for rules, loop in loops.items()}
    np.testing.assert_allclose(found["data"], found[None], atol=1e-6)
    state, plain = loops["data"].state, loops[None].state
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True):
        assert a.sharding.is_fully_replicated
        np.testing.assert_allclose(a, b, atol=1e-6)
    slots = jax.tree.leaves(state.opt_state)
    can_be_split = [any(n % 8 == 0 for n in x.shape) for x in slots]
    assert [not x.sharding.is_fully_replicated for x in slots] == can_be_split
    expected = sum(x.nbytes // 8 if can else x.nbytes for x, can in zip(slots, can_be_split))
    assert n_bytes_on_a_device(slots) == expected < trees.n_bytes(slots) / 2
    assert not all(can_be_split)
