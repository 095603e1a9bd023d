"""Optimizers by name: which there are, what they become, and what a resumed run needs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.optim import muon, named, sphere
from tekoa.optim.amos import transform
from tekoa.optim.scales.auto import scales_of_function
from tekoa.testing import assert_trees_equal


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {"a": normal(0, (6, 5)), "b": normal(1, (5, 3))}
GRADS = {"a": normal(2, (6, 5)), "b": normal(3, (5, 3))}
X = normal(4, (8, 6))


def find_table(x=X):
    return scales_of_function(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], PARAMS, x)


def no_table():
    raise AssertionError("This optimizer needs no scales.")


def first_update(tx):
    return tx.update(GRADS, tx.init(PARAMS), PARAMS)[0]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("auto", lambda: sphere.sphere(find_table(), n_steps=50)),
        ("sphere", lambda: sphere.sphere(find_table(), n_steps=50)),
        ("muon", lambda: muon.muon_for(find_table(), n_steps=50)),
        ("adamw", lambda: optax.adamw(5e-4)),
        ("sgd", lambda: optax.sgd(0.1)),
        ("prodigy", optax.contrib.prodigy),
        ("schedule_free_adamw", optax.contrib.schedule_free_adamw),
    ],
)
def test_name_stands_for_the_optimizer(name, make):
    optimizer = named.NamedOptimizer(name)
    optimizer.resolve(find_table, n_steps=50)
    assert_trees_equal(first_update(optimizer), first_update(make()))


def test_optax_needs_no_table():
    assert named.NamedOptimizer("adam").resolve(no_table, n_steps=None) == (
        "Optimizer adam: learning rate 0.0005."
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Specifying a key")  # Of optax.
@pytest.mark.parametrize("name", sorted(set(named.makers()) - set(named.BY_SCALES)))
def test_every_name_of_optax_creates_an_optimizer(name):
    choice = named.choose(name, no_table, n_steps=10)
    assert hasattr(choice.optimizer, "init")
    assert name in choice.text


def test_names_of_optax_and_contrib_are_covered():
    expected = {"adam", "adamw", "lion", "lbfgs", "nadamw", "polyak_sgd"}
    expected |= {"prodigy", "dadapt_adamw", "ademamix"}
    assert expected <= set(named.makers())
    assert not {"chain", "scale_by_adam", "apply_updates"} & set(named.makers())


def test_a_rate_replaces_the_default():
    for name, make in [("polyak_sgd", optax.polyak_sgd), ("prodigy", optax.contrib.prodigy)]:
        optimizer = named.NamedOptimizer(name, 0.1)
        assert optimizer.resolve(no_table, n_steps=None).endswith(": learning rate 0.1.")
        state = optimizer.init(PARAMS)
        updates = optimizer.update(GRADS, state, PARAMS, value=1e6)[0]
        expected = optax.with_extra_args_support(make(0.1))
        assert_trees_equal(updates, expected.update(GRADS, state, PARAMS, value=1e6)[0])


def test_unknown_name_suggests_the_closest():
    with pytest.raises(ValueError, match=r"There is no optimizer 'adamm'\. Did you mean 'adam'"):
        named.NamedOptimizer("adamm")


def test_unresolved_optimizer_says_what_to_do():
    with pytest.raises(ValueError, match=r"'auto' is not resolved yet.*TrainLoop"):
        named.NamedOptimizer("auto").init(PARAMS)


def test_line_says_what_was_chosen():
    line = named.NamedOptimizer("auto").resolve(find_table, n_steps=50)
    assert line == (
        "Optimizer auto (sphere): planned for 50 steps; hidden kernels on their scale: 1, "
        "outputs: 1."
    )


def test_without_a_number_of_steps_the_steps_decrease_forever():
    optimizer = named.NamedOptimizer("auto")
    assert "unknown number of steps" in optimizer.resolve(find_table, n_steps=None)
    assert_trees_equal(
        first_update(optimizer),
        first_update(sphere.sphere(find_table(), learning_rate=sphere.anytime_step_size())),
    )


def test_amos_without_a_number_of_steps_is_the_published_form():
    optimizer, table = named.NamedOptimizer("amos"), find_table()
    line = optimizer.resolve(find_table, n_steps=None)
    assert line.endswith("the published form, learning rate 0.01.")
    published = transform.amos(0.01, table.eta_fn, table.shape_fn)
    assert_trees_equal(first_update(optimizer), first_update(published))


@pytest.mark.parametrize("name", ["auto", "sphere", "muon"])
@pytest.mark.parametrize("version", [None, 5, 99])
def test_run_with_other_rules_is_refused(name, version):
    saved = {"name": name, "n_steps": 50, "eta": find_table().etas}
    if version:  # The first runs had none.
        saved["rule"] = version
    expected = f"version {version or 1} of the rules of '{name}'; this Tekoa has version "
    with pytest.raises(ValueError, match=expected):
        named.NamedOptimizer(name).resolve(find_table, n_steps=50, saved=saved)


def test_resumed_run_uses_the_saved_scales():
    first = named.NamedOptimizer("auto")
    first.resolve(find_table, n_steps=50)
    saved = json.loads(json.dumps(first.facts))
    resumed = named.NamedOptimizer("auto")
    line = resumed.resolve(lambda: find_table(7 * X), n_steps=50, saved=saved)
    assert_trees_equal(first_update(resumed), first_update(first))
    assert "earlier" not in line
    longer = resumed.resolve(find_table, n_steps=80, saved=saved)
    assert longer.endswith("The earlier part of this run was planned for 50 steps.")


def test_scales_of_a_stack_survive_json():
    stack = {"stack": normal(0, (3, 6, 6)), "b": normal(1, (6, 2))}

    def fn(p, x):
        for i in range(3):
            x = 3 * jax.nn.relu(x) @ p["stack"][i] if i else x @ p["stack"][i]
        return x @ p["b"]

    table = scales_of_function(fn, stack, X)
    again = table.with_etas(json.loads(json.dumps(table.etas)))
    assert table["stack"].eta_by_slice is not None
    np.testing.assert_array_equal(
        again.eta_fn(("stack",), (3, 6, 6)), table.eta_fn(("stack",), (3, 6, 6))
    )


@pytest.mark.parametrize("name", ["auto", "sphere", "muon"])
def test_rate_that_is_shown_is_the_size_of_a_step(name):
    size = sphere.step_size(100)
    for step in (1, 30, 80):
        shown = named.rate_at({"name": name, "n_steps": 100}, step)
        assert shown == pytest.approx(float(size(step - 1)))


def test_sophia_gets_the_loss_whose_curvature_it_estimates():
    tx = named.makers()["sophia"](0.1)
    params = {"w": jnp.array([3.0, -2.0])}

    def loss(params):
        return jnp.sum(jnp.square(params["w"]))

    before, state = loss(params), tx.init(params)
    for _ in range(12):
        updates, state = tx.update(jax.grad(loss)(params), state, params, value_fn=loss)
        params = optax.apply_updates(params, updates)
    assert loss(params) < 0.8 * before
