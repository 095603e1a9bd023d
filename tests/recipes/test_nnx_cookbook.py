"""Custom NNX loops, as in the cookbook of Flax, with optimizers of this package."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P

import tekoa
from tekoa.optim.triples import classic, convert
from tekoa.testing import assert_trees_equal

OPTIMIZERS = {
    "amos": lambda rate: tekoa.amos(rate, lambda name, shape: 0.5),
    "amos_reduced": lambda rate: tekoa.amos(
        rate, lambda name, shape: 0.5, lambda name, shape: (1,) * len(shape)
    ),
    "triple": lambda rate: convert.from_triple(classic.adam(rate)),
    "rated": lambda rate: tekoa.rated(optax.adam, rate),
    "groups": lambda rate: tekoa.param_groups({"kernel$": rate, ".*": 2 * rate}, make=optax.adam),
}
QUICK = ("amos",)
all_optimizers = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, make in OPTIMIZERS.items()
    ],
)


def make_model(**sharding):
    rngs = nnx.Rngs(0)
    init = functools.partial(jax.nn.initializers.lecun_normal(), **sharding)
    return nnx.Sequential(
        nnx.Linear(2, 8, rngs=rngs, kernel_init=init), nnx.Linear(8, 8, rngs=rngs, kernel_init=init)
    )


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def make_data():
    rngs = nnx.Rngs(1)
    return rngs.normal((32, 2)), rngs.normal((32, 8))


def make_step():
    @nnx.jit
    def train_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return loss

    return train_step


def run(model, optimizer, n_steps=6):
    step, data = make_step(), make_data()
    return [float(step(model, optimizer, *data)) for _ in range(n_steps)]


class Ema(nnx.Module):
    def __init__(self, model, decay):
        self.decay = decay
        self.ema = jax.tree.map(jnp.copy, model)

    def update(self, model):
        mix = lambda mean, new: self.decay * mean + (1 - self.decay) * new
        self.ema = jax.tree.map(mix, self.ema, model)


@all_optimizers
def test_a_custom_moving_average(make):
    model, data = make_model(), make_data()
    ema = Ema(model, decay=0.9)
    optimizer = nnx.Optimizer(model, make(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, ema, x, y):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        ema.update(model)
        return loss

    expected = model.layers[0].kernel[...]
    losses = []
    for _ in range(4):
        losses.append(float(train_step(model, optimizer, ema, *data)))
        expected = 0.9 * expected + 0.1 * model.layers[0].kernel[...]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(ema.ema.layers[0].kernel[...], expected, rtol=1e-5)


@all_optimizers
def test_low_rank_adapters_of_flax(make):
    def add_lora(path, node):
        if not isinstance(node, nnx.Linear):
            return node
        return nnx.LoRA(node.in_features, 2, node.out_features, base_module=node, rngs=nnx.Rngs(2))

    model = nnx.recursive_map(add_lora, make_model())
    wrt = nnx.LoRAParam
    # Names end in lora_a and lora_b, so the table for kernels does not match them.
    tx = make(1e-2) if make is not OPTIMIZERS["groups"] else OPTIMIZERS["rated"](1e-2)
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    base = jax.tree.map(jnp.copy, nnx.state(model, lambda path, v: type(v) is nnx.Param))
    losses = run(model, optimizer)
    assert losses[-1] < losses[0]
    assert_trees_equal(nnx.state(model, lambda path, v: type(v) is nnx.Param), base)


@pytest.mark.parametrize(
    "tx",
    [optax.lbfgs(), tekoa.param_groups({".*": optax.lbfgs()})],
    ids=["alone", "in_a_group"],
)
def test_a_line_search_with_value_and_gradient(tx):
    model, (x, y) = make_model(), make_data()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
        graph = nnx.graphdef(model)
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(
            model,
            grads,
            grad=grads,
            value=loss,
            value_fn=lambda state: loss_fn(nnx.merge(graph, state), x, y),
        )
        return loss

    losses = [float(train_step(model, optimizer)) for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    # The model is linear, so the minimum has a closed form.
    design = np.concatenate([x, np.ones((32, 1))], 1)
    residuals = y - design @ np.linalg.lstsq(design, y)[0]
    assert losses[-1] < np.mean(np.square(residuals)) + 0.02


@pytest.mark.parametrize("name", ["amos", "triple", "rated"])
def test_rates_by_state_labels(name):
    make, model = OPTIMIZERS[name], make_model()
    labels = nnx.map_state(lambda path, v: list(path)[-1], nnx.state(model, nnx.Param))
    tx = optax.partition({"kernel": make(1e-2), "bias": optax.set_to_zero()}, labels)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = run(model, optimizer)
    assert losses[-1] < losses[0]
    assert not model.layers[0].bias[...].any()


@all_optimizers
def test_accumulation_with_multi_steps(make):
    model = make_model()
    tx = optax.MultiSteps(make(1e-2), every_k_schedule=3)
    losses = run(model, nnx.Optimizer(model, tx, wrt=nnx.Param), n_steps=6)
    assert losses[0] == losses[1] == losses[2] > losses[3] == losses[4] == losses[5]


@all_optimizers
def test_an_optimizer_of_an_abstract_model_has_its_own_sharding(make):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(lambda: make_model(out_sharding=P("x", "y")))
        optimizer = nnx.Optimizer(abstract, make(1e-2), wrt=nnx.Param)
        model, data, step = make_model(), make_data(), make_step()
        losses = []
        for _ in range(3):
            losses.append(float(step(model, optimizer, *data)))
            model = reshard(model, P())
        slots = [x for x in jax.tree.leaves(optimizer.opt_state) if x.shape == (8, 8)]
        assert all(str(x.sharding.spec) == str(P("x", "y")) for x in slots)
        assert model.layers[1].kernel[...].sharding.is_fully_replicated
    model = make_model()
    expected = run(model, nnx.Optimizer(model, make(1e-2), wrt=nnx.Param), n_steps=3)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
