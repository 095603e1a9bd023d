import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.core import sharding, sharding_mesh

P = jax.P
ABSTRACT = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(8, kernel_init=init)(x)
        return nn.BatchNorm(use_running_average=not train)(x)


def form_of(layout):
    fns = tekoa.as_model_fns(Model())
    rng, inputs = jax.random.key(0), (np.zeros((4, 3), np.float32),)
    make = lambda: tekoa.init_state(fns, optax.adam(0.1), rng, inputs=inputs, ema=0.9)
    return layout.state_specs(jax.eval_shape(make), fns.axes(rng, inputs))


def test_the_whole_state_has_specs():
    found = form_of(sharding.Layout(mesh=ABSTRACT, logical_axis_rules=[("mlp", "model")]))
    assert found.params["Dense_0"] == {"kernel": P(None, "model"), "bias": P()}
    assert found.opt_state[0].mu["Dense_0"]["kernel"] == P(None, "model")
    assert found.opt_state[0].count == P()
    assert found.average == found.params
    assert found.variables["batch_stats"]["BatchNorm_0"] == {"mean": P(), "var": P()}
    assert found.rng == found.step == P()


def test_a_rule_may_be_one_axis_for_all():
    layout = sharding.Layout(mesh=ABSTRACT, rules="model", optimizer_rules="data")
    found = form_of(layout)
    assert found.params["Dense_0"] == {"kernel": P(None, "model"), "bias": P("model")}
    assert found.variables["batch_stats"]["BatchNorm_0"]["mean"] == P("model")
    assert found.opt_state[0].mu["Dense_0"]["kernel"] == P(None, ("model", "data"))


def test_layouts_that_cannot_be_are_errors():
    with pytest.raises(ValueError, match="'a' of optimizer_rules names the axis 'fsdp'"):
        sharding.Layout(mesh=ABSTRACT, optimizer_rules={"a": "fsdp"})
    with pytest.raises(ValueError, match="'embed' of logical_axis_rules names the axis 'tensor'"):
        sharding.Layout(mesh=ABSTRACT, logical_axis_rules=[("embed", "tensor")])
    with pytest.raises(ValueError, match="batch_axes names the axis 'rows'"):
        sharding.Layout(mesh=ABSTRACT, batch_axes=["rows"])
    with pytest.raises(ValueError, match="Which axes split the rows"):
        sharding.Layout(mesh=jax.sharding.AbstractMesh((2,), ("x",)))


def test_activations_follow_the_layout_in_force_where_they_divide():
    layout = sharding.Layout(
        mesh=sharding_mesh.make_mesh(model=4), logical_axis_rules=[("mlp", "model")]
    )

    def traced(x):
        with layout.active():
            return sharding.constrain(x, "batch", "mlp")

    for shape, part in {(4, 8): (2, 2), (3, 8): (3, 2)}.items():
        shards = jax.jit(traced)(jnp.ones(shape)).addressable_shards
        assert {shard.data.shape for shard in shards} == {part}
    assert sharding.active_layout() is None


def test_one_process_gives_all_rows():
    layout = sharding.Layout(mesh=sharding_mesh.make_mesh(model=2))
    assert sharding.local_rows(layout, 8) == slice(0, 8)
    with pytest.raises(ValueError, match="6 rows does not divide among the 4 parts"):
        sharding.local_rows(layout, 6)


def test_a_layout_names_its_mesh():
    assert str(sharding.Layout(mesh=ABSTRACT)) == "data=2, model=4 (8 devices)"
