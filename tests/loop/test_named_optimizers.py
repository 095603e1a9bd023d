"""Optimizers by name in a training loop: resolved, reported, saved, resumed."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.bridges.any_model import as_model_fns
from tekoa.bridges.lora import lora
from tekoa.extensions.checkpoint_files import CheckpointFileReader, CheckpointFileWriter
from tekoa.loop.task import TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.optim import sphere
from tekoa.optim.groups import param_groups
from tekoa.optim.scales.auto import scales_of_function
from tekoa.sharding.layout import Layout
from tekoa.sharding.mesh import make_mesh
from tekoa.testing import assert_trees_equal


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {"a": 3 * normal(0, (4, 8)), "b": normal(1, (8, 1))}
DATA = [(x, np.tanh(x[:, :1]) * 5) for x in normal(2, (20, 16, 4))]


def apply(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def mse(out, y):
    return jnp.mean((out - y) ** 2)


def make_loop(optimizer="auto", *, n_steps=12, model=PARAMS, data=DATA, **options):
    task = TrainTask(apply=apply, optimizer=optimizer, loss=mse, data=data)
    return TrainLoop(
        model, task, n_steps=n_steps, n_steps_per_checkpoint=6, rng=jax.random.key(1), **options
    )


def end(loop):
    *_, last = loop
    return last.state


def test_auto_trains_like_sphere_for_the_scales_of_the_first_batch(capsys):
    table = scales_of_function(lambda p, x, y: mse(apply(p, x), y), PARAMS, *DATA[0])
    expected = end(make_loop(sphere.sphere(table, n_steps=12)))
    assert_trees_equal(end(make_loop(stdout=True)).params, expected.params)
    assert (
        "Optimizer auto (sphere): planned for 12 steps; hidden kernels" in capsys.readouterr().out
    )


def test_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="There is no optimizer 'autoo'"):
        make_loop("autoo")


def test_loop_without_a_number_of_steps_runs_to_the_end_of_the_data():
    loop = make_loop(n_steps=None)
    assert end(loop).step == len(DATA)
    assert loop.facts["optimizer"]["n_steps"] is None


def test_resumed_run_has_the_same_optimizer_even_if_the_first_batch_differs(tmp_path):
    straight = end(make_loop())
    loop = make_loop()
    with contextlib.closing(CheckpointFileWriter(tmp_path)) as write:
        write(next(iter(loop)))
    other_first = [(10 * DATA[0][0], DATA[0][1]), *DATA[1:]]
    resumed = make_loop(model=CheckpointFileReader(tmp_path, PARAMS), data=other_first)
    assert resumed.step == 6
    assert resumed.facts["optimizer"] == loop.facts["optimizer"]
    assert_trees_equal(end(resumed), straight)


def test_resumed_run_of_another_length_says_so(tmp_path, capsys):
    with contextlib.closing(CheckpointFileWriter(tmp_path)) as write:
        write(next(iter(make_loop())))
    make_loop(model=CheckpointFileReader(tmp_path, PARAMS), n_steps=15, stdout=True)
    assert "earlier part of this run was planned for 12 steps" in capsys.readouterr().out


def test_names_in_groups_are_resolved_and_resumed(tmp_path, capsys):
    make = lambda **options: make_loop(param_groups({"a$": "auto", ".*": "adamw"}), **options)
    straight = end(make(stdout=True))
    line = "Group 'a$': Optimizer auto (sphere): planned for 12 steps; hidden kernels"
    assert line in capsys.readouterr().out
    table = scales_of_function(lambda p, x, y: mse(apply(p, x), y), PARAMS, *DATA[0])
    by_hand = param_groups({"a$": sphere.sphere(table, n_steps=12), ".*": optax.adamw(5e-4)})
    assert_trees_equal(straight.params, end(make_loop(by_hand)).params)
    loop = make()
    with contextlib.closing(CheckpointFileWriter(tmp_path)) as write:
        write(next(iter(loop)))
    other_first = [(10 * DATA[0][0], DATA[0][1]), *DATA[1:]]
    resumed = make(model=CheckpointFileReader(tmp_path, PARAMS), data=other_first)
    assert resumed.facts == loop.facts
    assert_trees_equal(end(resumed), straight)


EXPLICIT = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"on_nan": "skip"},
        {"steps_per_dispatch": 3},
        {"mesh": make_mesh(data=8)},
        {"mesh": make_mesh(data=4, model=2), "rules": {"a$": (None, "model")}},
        {"mesh": EXPLICIT, "rules": {"a$": (None, "model")}},
        {"mesh": EXPLICIT, "rules": {"a$": ("model", None)}},
    ],
    ids=["accumulate", "guard", "dispatch", "mesh", "sharded", "explicit", "explicit_rows"],
)
def test_auto_does_not_depend_on_how_steps_are_run(options):
    if "mesh" in options:
        options = {"layout": Layout(mesh=options["mesh"], rules=options.get("rules", {}))}
    plain, other = end(make_loop()), end(make_loop(**options))
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(other.params)):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_auto_with_a_moving_average():
    state = end(make_loop(ema=0.5))
    assert_trees_equal(state.params, end(make_loop()).params)
    assert np.any(state.average["a"] != state.params["a"])


@pytest.mark.parametrize("name", ["auto", "muon", "amos"])
def test_optimizers_by_scales_train_adapters(name):
    model = lora(as_model_fns(PARAMS, apply), rank=1)
    task = TrainTask(optimizer=name, loss=mse, data=DATA)
    loop = TrainLoop(model, task, n_steps=20, n_steps_per_checkpoint=1)
    losses = [float(checkpoint.metrics["train"]["loss"]) for checkpoint in loop]
    assert losses[-1] < 0.9 * losses[0]
    for leaf in jax.tree.leaves(loop.state.params):
        assert np.any(np.asarray(leaf) != 0)
