"""Schedule-Free optimizers are evaluated at their average, wherever they are in a chain."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.core.update import average
from tekoa.testing import assert_trees_equal

PARAMS = {"w": np.float32([1.0, -2.0]), "b": np.float32(0.5)}
DATA = [(x, x.sum(1)) for x in np.random.default_rng(0).normal(size=(6, 8, 2)).astype(np.float32)]


def apply(params, x):
    return x @ params["w"] + params["b"]


def mse(out, y):
    return jnp.mean((out - y) ** 2)


def make_loop(optimizer, model=PARAMS, **options):
    task = tekoa.TrainTask(apply=apply, optimizer=optimizer, loss=mse, data=DATA)
    return tekoa.TrainLoop(model, task, n_steps=6, n_steps_per_checkpoint=3, **options)


def sgd():
    return optax.contrib.schedule_free_sgd(0.1, b1=0.8)


def by_hand(optimizer):
    """Steps with optax alone; returns the point of the gradients and that of evaluation."""
    params, state = PARAMS, optimizer.init(PARAMS)
    for batch in DATA:
        grads = jax.grad(lambda p, batch=batch: mse(apply(p, batch[0]), batch[1]))(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, optax.contrib.schedule_free_eval_params(state, params)


CHAINS = {
    "alone": sgd,
    "chain": lambda: optax.chain(optax.clip(1e6), sgd()),
    "accumulated": lambda: optax.MultiSteps(sgd(), 1).gradient_transformation(),
    "groups": lambda: tekoa.param_groups({"w": sgd(), "b": sgd()}),
    "named": lambda: "schedule_free_sgd",
}


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_loops_evaluate_at_the_average(make):
    optimizer = make()
    loop = make_loop(optimizer)
    *_, last = loop
    is_named = isinstance(optimizer, str)
    gradient_point, expected = by_hand(optax.contrib.schedule_free_sgd() if is_named else sgd())
    for name, value in expected.items():
        np.testing.assert_allclose(last.state.params[name], gradient_point[name], rtol=1e-5)
        np.testing.assert_allclose(last.state.eval_params[name], value, rtol=1e-5)
        np.testing.assert_allclose(loop.averaged_model[name], value, rtol=1e-5)
    metrics = loop.evaluation({"loss": mse}, DATA)(last).metrics["eval"]
    loss = np.mean([mse(apply(expected, x), y) for x, y in DATA])
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)


def test_other_groups_are_evaluated_where_they_are():
    *_, last = make_loop(tekoa.param_groups({"w": sgd(), "b": optax.sgd(0.1)}))
    assert last.state.eval_params["b"] == last.state.params["b"]
    assert np.any(last.state.eval_params["w"] != last.state.params["w"])


def test_parts_of_a_tree_may_be_masked():
    params = {"dense": {"w": np.float32(1), "b": np.float32(2)}, "head": {"w": np.float32(3)}}
    tx = optax.masked(sgd(), {"dense": False, "head": True})
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(np.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    expected = optax.contrib.schedule_free_eval_params(
        state.inner_state._replace(z=state.inner_state.z["head"]), params["head"]
    )
    result = average.schedule_free_params(state, params)
    assert_trees_equal(result, {"dense": params["dense"], "head": expected})
    assert result["head"]["w"] != params["head"]["w"]


def test_average_is_saved_and_resumed(tmp_path):
    *_, straight = make_loop(sgd())
    with contextlib.closing(tekoa.CheckpointFileWriter(tmp_path)) as write:
        write(next(iter(make_loop(sgd()))))
    saved = tekoa.load_checkpoint(tmp_path)
    assert np.any(saved["average"]["w"] != saved["model_params"]["w"])
    *_, resumed = make_loop(sgd(), tekoa.CheckpointFileReader(tmp_path, PARAMS))
    assert_trees_equal(resumed.state, straight.state)


def test_moving_average_of_a_schedule_free_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"ema=0\.9 cannot be combined with a Schedule-Free"):
        make_loop(sgd(), ema=0.9)


def test_other_optimizers_have_no_average():
    assert not average.is_schedule_free(optax.adam(0.1).init(PARAMS))
    *_, last = make_loop(optax.adam(0.1))
    assert last.state.average is None
