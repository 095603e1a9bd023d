"""Models that name their axes, of every library that can, trained and evaluated on a mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import partitioning

import tekoa

pytestmark = pytest.mark.slow

RULES = (("embed", None), ("mlp", "model"))
AXES = ("embed", "mlp")


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), AXES)
        x = nn.with_logical_constraint(nn.Dense(8, kernel_init=init)(x), ("batch", "mlp"))
        return nn.Dense(1)(x)


class Listed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        w = partitioning.param_with_axes("kernel", init, (x.shape[-1], 8), axes=AXES)
        return nn.Dense(1)(tekoa.constrain(x @ w, "batch", "mlp"))


class Annotated(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), AXES, eager_sharding=False)
        self.first = nnx.Linear(4, 8, kernel_init=init, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(tekoa.constrain(self.first(x), "batch", "mlp"))


MODELS = {"linen": Boxed, "linen axes": Listed, "nnx": lambda: Annotated(nnx.Rngs(0))}


def data(n, n_rows=8):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n_rows, 4)).astype(np.float32) for _ in range(n)]
    return [(x, x[:, :1]) for x in xs]


def error(y, t):
    return jnp.mean((y - t) ** 2)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_and_is_measured_on_a_mesh_as_on_one_device(name):
    layout = tekoa.Layout(mesh=tekoa.make_mesh(model=4), logical_axis_rules=RULES)
    # The last batch cannot be split among the devices.
    held_out = data(2) + data(1, n_rows=5)
    found = {}
    for where in (None, layout):
        model = MODELS[name]()
        task = tekoa.TrainTask(optimizer=optax.adam(1e-2), data=data(6), loss=error)
        loop = tekoa.TrainLoop(model, task, n_steps_per_checkpoint=3, layout=where, n_steps=6)
        measure = tekoa.EvalLoop(
            tekoa.EvalTask(metrics={"error": error}, data=held_out),
            init=loop.model_fns,
            layout=where,
        )
        found[where is None] = [measure(c).metrics["eval"]["error"] for c in loop]
        state = loop.state
    np.testing.assert_allclose(found[False], found[True], rtol=1e-5)
    shapes = {
        path: {shard.data.shape for shard in x.addressable_shards}
        for path, x in jax.tree_util.tree_flatten_with_path(state.params)[0]
    }
    assert {(4, 2)} in shapes.values()
    # A state of one device is put where the layout says.
    alone = jax.device_put(state, jax.devices()[0])
    again = measure(tekoa.Checkpoint(**{**vars_of(loop.checkpoint()), "state": alone}))
    assert again.metrics["eval"]["error"] == pytest.approx(found[False][-1], rel=1e-5)


def vars_of(summary):
    names = ("state", "step", "loss", "grads", "n_completed_steps", "elapsed_time")
    return {name: getattr(summary, name) for name in names}
