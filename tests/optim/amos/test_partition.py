import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tekoa.core import formula, rules
from tekoa.optim import amos_helper
from tekoa.optim.amos import partition as partition_lib
from tekoa.optim.amos import transform

PARAMS = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}, "scale": jnp.ones(())}
AXES = {"dense": {"kernel": P("data", "model"), "bias": P("model")}, "scale": None}


def state_with(shape_fn):
    return transform.scale_by_amos(0.1, lambda name, shape: 1.0, shape_fn).init(PARAMS)


def test_rule_functions_are_those_of_core():
    assert amos_helper.params_fn_from_assign_map is rules.params_fn_from_assign_map
    assert amos_helper.evaluate is formula.evaluate


@pytest.mark.parametrize(
    ("shape_fn", "kernel", "bias"),
    [
        (None, P("data", "model"), P("model")),
        (lambda name, shape: (*shape[:-1], 1) if shape else (), P("data", None), P(None)),
        (lambda name, shape: (1,) * len(shape), P(None, None), P(None)),
        (lambda name, shape: (), None, None),
        (lambda name, shape: shape[-1:], P("model"), P("model")),
        (lambda name, shape: (1,) if shape else (), P(None), P(None)),
    ],
    ids=["full", "reduced_last", "all_ones", "scalar", "lower_rank", "lower_rank_ones"],
)
def test_slots_are_partitioned_like_their_parameters(shape_fn, kernel, bias):
    partition = partition_lib.state_partition_rule(state_with(shape_fn), AXES)
    assert partition.count is None
    for slot in (partition.v, partition.b):
        assert slot == {"dense": {"kernel": kernel, "bias": bias}, "scale": None}


def test_axes_may_be_tuples_combined_or_omitted():
    state = transform.scale_by_amos(0.1, lambda n, s: 1.0).init([jnp.ones((4, 8, 2))] * 4)
    axes = [("x", None, "y"), P(("x", "y")), None, P()]
    assert partition_lib.state_partition_rule(state, axes).v == [
        P("x", None, "y"),
        P(("x", "y"), None, None),
        None,
        P(None, None, None),
    ]


def test_shapes_suffice_and_masked_slots_stay_masked():
    tx = transform.scale_by_amos(0.1, lambda name, shape: 1.0)
    masked = optax.masked(tx, {"dense": True, "scale": False})
    state = jax.eval_shape(masked.init, PARAMS).inner_state
    partition = partition_lib.state_partition_rule(state, AXES)
    assert partition.v["dense"] == AXES["dense"]
    assert isinstance(partition.v["scale"], optax.MaskedNode)


def test_partition_can_be_placed_on_a_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    state = state_with(lambda name, shape: (shape[0], 1) if len(shape) == 2 else shape)
    partition = partition_lib.state_partition_rule(state, AXES)
    v = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec or P())), state.v, partition.v
    )
    assert v["dense"]["kernel"].sharding.shard_shape((4, 1)) == (2, 1)
    assert v["dense"]["bias"].sharding.shard_shape((8,)) == (2,)


def test_chain_state_is_refused_with_a_hint():
    state = transform.amos(0.1, lambda n, s: 1.0, momentum=0.9).init(PARAMS)
    with pytest.raises(TypeError, match=r"ScaleByAmosState.*chain"):
        partition_lib.state_partition_rule(state, AXES)


def test_axes_with_another_structure_are_refused():
    with pytest.raises(ValueError, match="params_axes"):
        partition_lib.state_partition_rule(state_with(None), {"dense": AXES["dense"]})


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((4, 8), ("embed", "mlp"), P("embed", "mlp")),
        ((1, 8), ("embed", "mlp"), P("reduced_embed", "mlp")),
        ((1, 1), P("embed", "mlp"), P("reduced_embed", "reduced_mlp")),
        ((8,), ("embed", "mlp"), P("mlp")),
        ((1,), ("embed", "mlp"), P("reduced_mlp")),
        ((1, 8), (None, "mlp"), P(None, "mlp")),
        ((1, 8), (("a", "b"), "mlp"), P(("reduced_a", "reduced_b"), "mlp")),
        ((), ("embed", "mlp"), None),
        ((4, 8), None, None),
    ],
)
def test_reduced_axes_get_a_prefix(shape, axes, expected):
    for var in (np.ones(shape), jax.ShapeDtypeStruct(shape, jnp.float32)):
        assert partition_lib.maybe_reduce_axis_names(var, axes) == expected
