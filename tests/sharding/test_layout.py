import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.sharding import layout as layout_lib
from tekoa.sharding import mesh

P = jax.P
ABSTRACT = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(8, kernel_init=init)(x)
        return nn.BatchNorm(use_running_average=not train)(x)


def state_specs(layout):
    fns = tekoa.as_model_fns(Model())
    rng, inputs = jax.random.key(0), (np.zeros((4, 3), np.float32),)
    make = lambda: tekoa.init_state(fns, optax.adam(0.1), rng, inputs=inputs, ema=0.9)
    return layout.state_specs(jax.eval_shape(make), fns.axes(rng, inputs))


def test_every_array_of_the_state_has_a_spec():
    specs = state_specs(layout_lib.Layout(mesh=ABSTRACT, logical_axis_rules=[("mlp", "model")]))
    assert specs.params["Dense_0"] == {"kernel": P(None, "model"), "bias": P()}
    assert specs.opt_state[0].mu["Dense_0"]["kernel"] == P(None, "model")
    assert specs.opt_state[0].count == P()
    assert specs.average == specs.params
    assert specs.variables["batch_stats"]["BatchNorm_0"] == {"mean": P(), "var": P()}
    assert specs.rng == specs.step == P()


def test_rules_may_be_one_axis_for_all_arrays():
    layout = layout_lib.Layout(mesh=ABSTRACT, rules="model", optimizer_rules="data")
    specs = state_specs(layout)
    assert specs.params["Dense_0"] == {"kernel": P(None, "model"), "bias": P("model")}
    assert specs.variables["batch_stats"]["BatchNorm_0"]["mean"] == P("model")
    assert specs.opt_state[0].mu["Dense_0"]["kernel"] == P(None, ("model", "data"))


def test_invalid_layouts_are_errors():
    with pytest.raises(ValueError, match="'a' of optimizer_rules names the axis 'fsdp'"):
        layout_lib.Layout(mesh=ABSTRACT, optimizer_rules={"a": "fsdp"})
    with pytest.raises(ValueError, match="'embed' of logical_axis_rules names the axis 'tensor'"):
        layout_lib.Layout(mesh=ABSTRACT, logical_axis_rules=[("embed", "tensor")])
    with pytest.raises(ValueError, match="batch_axes names the axis 'rows'"):
        layout_lib.Layout(mesh=ABSTRACT, batch_axes=["rows"])
    with pytest.raises(ValueError, match="No mesh axis splits the rows"):
        layout_lib.Layout(mesh=jax.sharding.AbstractMesh((2,), ("x",)))


def test_activations_are_split_by_the_active_layout_if_possible():
    layout = layout_lib.Layout(mesh=mesh.make_mesh(model=4), logical_axis_rules=[("mlp", "model")])

    def traced(x):
        with layout.active():
            return layout_lib.constrain(x, "batch", "mlp")

    for shape, part in {(4, 8): (2, 2), (3, 8): (3, 2)}.items():
        shards = jax.jit(traced)(jnp.ones(shape)).addressable_shards
        assert {shard.data.shape for shard in shards} == {part}
    assert layout_lib.active_layout() is None


def test_a_single_process_provides_all_rows():
    layout = layout_lib.Layout(mesh=mesh.make_mesh(model=2))
    assert layout_lib.local_rows(layout, 8) == slice(0, 8)
    with pytest.raises(ValueError, match="6 rows cannot be split into 4 equal parts"):
        layout_lib.local_rows(layout, 6)


def test_the_text_of_a_layout_is_its_mesh():
    assert str(layout_lib.Layout(mesh=ABSTRACT)) == "data=2, model=4 (8 devices)"
