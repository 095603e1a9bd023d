"""A changed optimizer chain keeps the parts that match, and reports the others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.store.read import load
from tekoa.store.transfer.migrate import migrate

PARAMS = {"a": jnp.ones(2), "b": {"c": jnp.ones(3)}}


def trained(tx, n_steps=3):
    state = tx.init(PARAMS)
    for _ in range(n_steps):
        _, state = tx.update(PARAMS, state, PARAMS)
    return state


def save_and_migrate(saved, old, new):
    state = trained(old)
    directory = saved({"model_params": PARAMS, "optimizer_state": state})
    return migrate(new.init(PARAMS), load.open_newest(directory)), state


CHAINS = {
    "clip_added": lambda adam: optax.chain(optax.clip_by_global_norm(1.0), adam),
    "wrapped": lambda adam: optax.MultiSteps(adam, 2).gradient_transformation(),
    "masked": lambda adam: optax.masked(adam, True),
    "schedule_added": lambda adam: optax.chain(adam, optax.scale_by_schedule(lambda n: 1.0)),
    "unchanged": lambda adam: adam,
}


@pytest.mark.parametrize("change", CHAINS.values(), ids=CHAINS)
def test_adam_moments_are_kept_in_a_changed_chain(saved, change):
    adam = optax.scale_by_adam()
    (state, table), old = save_and_migrate(saved, adam, change(optax.scale_by_adam()))
    (adam_state,) = [
        node
        for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
        if isinstance(node, optax.ScaleByAdamState)
    ]
    assert jax.tree.map(jnp.array_equal, adam_state, old) == jax.tree.map(lambda _: True, old)
    assert table.names("unexpected", "ambiguous", "other shape") == []
    assert len(table.names("loaded")) == 5


def test_removed_and_new_parts_are_listed(saved):
    old = optax.chain(optax.scale_by_adam(), optax.ema(0.9))
    (state, table), _ = save_and_migrate(saved, old, optax.chain(optax.trace(0.9), optax.ema(0.9)))
    assert int(state[1].count) == 3
    assert set(table.names("missing")) == {"0/trace/a", "0/trace/b/c"}
    assert {name.split("/")[1] for name in table.names("unexpected")} == {"count", "mu", "nu"}
    assert "from 1/" not in str(table)


def test_groups_load_from_a_single_optimizer(saved):
    groups = optax.partition(
        {"x": optax.scale_by_adam(), "y": optax.scale_by_adam()}, {"a": "x", "b": "y"}
    )
    (state, table), old = save_and_migrate(saved, optax.scale_by_adam(), groups)
    assert table.names("missing", "unexpected", "ambiguous") == []
    named = dict(zip(["x", "y"], (state.inner_states[k].inner_state for k in "xy"), strict=True))
    assert int(named["x"].count) == int(named["y"].count) == 3
    assert jnp.array_equal(named["x"].mu["a"], old.mu["a"])
    assert jnp.array_equal(named["y"].mu["b"]["c"], old.mu["b"]["c"])


def test_several_different_matches_are_ambiguous(saved):
    old = optax.chain(optax.trace(0.9), optax.scale(3.0), optax.trace(0.5))
    (state, table), _ = save_and_migrate(saved, old, optax.trace(0.9))
    assert set(table.names("ambiguous")) == {"trace/a", "trace/b/c"}
    assert float(state.trace["a"].sum()) == 0


def test_leaves_of_other_shapes_keep_their_initial_values(saved):
    old = optax.scale_by_adam()
    directory = saved({"optimizer_state": trained(old)})
    new = old.init({"a": jnp.ones(5), "b": {"c": jnp.ones(3)}})
    state, table = migrate(new, load.open_newest(directory))
    assert table.names("other shape") == ["mu/a", "nu/a"]
    assert state.mu["a"].shape == (5,)
    assert int(state.count) == 3


def test_state_of_a_t5x_checkpoint_is_matched_by_field_and_path(golden):
    source = load.open_newest(golden / "inline_amos")
    with np.load(golden / "inline_amos" / "expected.npz") as expected:
        v = expected["state/param_states/1/v/scale"]
        count = expected["state/param_states/1/count"]
    state, table = migrate({"v": {"scale": jnp.zeros(v.shape)}}, source)
    assert np.array_equal(state["v"]["scale"], v)
    assert table.names("loaded") == ["v/scale"]
    assert int(count) > 0
