"""Every optimizer of the package keeps the same promises."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tekoa.core import trees
from tekoa.optim import groups, muon, rates, sphere
from tekoa.optim.amos import budget, transform
from tekoa.optim.scales.roles import Role
from tekoa.optim.scales.table import ScaleRow, ScaleTable
from tekoa.optim.triples import classic, convert
from tekoa.testing import assert_trees_equal, count_compilations

# One table of groups is used for all kinds of trees, so that some groups are empty.
pytestmark = pytest.mark.filterwarnings("ignore::tekoa.optim.groups.UnusedRuleWarning")


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer as a function of its learning rate, with a suitable rate per problem."""

    make: Callable[..., optax.GradientTransformation]
    quadratic: float
    rosenbrock: float
    classification: float


def amos_with(slots=None, **kwargs):
    def make(learning_rate):
        return transform.amos(learning_rate, lambda name, shape: 1.0, slots, **kwargs)

    return make


def amos_with_warm_up(learning_rate):
    warm_up = lambda count: learning_rate * jnp.minimum(1.0, count / 8)
    return transform.amos(warm_up, lambda name, shape: 1.0)


class TableOfOutputs(ScaleTable):
    """A table for parameters of any name: matrices are outputs, the others are biases."""

    def __init__(self):
        super().__init__([])

    def row(self, name, shape):
        role, slot_shape = Role(kind="added", free=tuple(range(len(shape)))), ()
        if len(shape) > 1:
            free, slot_shape = tuple(range(1, len(shape))), (1, *shape[1:])
            role = Role(kind="contracted", contracted=(0,), free=free, is_output=True)
        return ScaleRow(
            name=name, shape=shape, eta=1.0, slot_shape=slot_shape, role=role, reason="by hand"
        )


def sphere_with(**kwargs):
    def make(learning_rate):
        return sphere.sphere(TableOfOutputs(), learning_rate=learning_rate, **kwargs)

    return make


class TableOfMatrices(TableOfOutputs):
    """The same table with hidden matrices, which Muon and sphere orthogonalise."""

    def row(self, name, shape):
        row = super().row(name, shape)
        return dataclasses.replace(row, role=dataclasses.replace(row.role, is_output=False))


def sphere_with_blocks(learning_rate):
    return sphere.sphere(TableOfMatrices(), learning_rate=learning_rate, max_side=2)


def muon_with(learning_rate):
    return muon.muon_for(TableOfMatrices(), learning_rate=learning_rate)


def later_amos(learning_rate):
    """The later form of Amos has no rate, but a number of steps."""
    return budget.amos_for_budget(round(10 / learning_rate), lambda name, shape: 1.0)


def triple(maker, **kwargs):
    return lambda learning_rate: convert.from_triple(maker(learning_rate, **kwargs))


def two_groups(learning_rate):
    return groups.param_groups(
        {
            "(bias|left|0)$": rates.rated(triple(classic.momentum, mass=0.9), learning_rate),
            ".*": rates.rated(triple(classic.adam), learning_rate),
        }
    )


last_axis = lambda name, shape: (1,) * (len(shape) - 1) + shape[-1:]

OPTIMIZERS = {
    "amos_full": Case(amos_with(), 0.1, 0.05, 0.1),
    "amos_reduced": Case(amos_with(last_axis), 0.1, 0.05, 0.1),
    "amos_scalar": Case(amos_with(lambda name, shape: ()), 0.1, 0.05, 0.1),
    "amos_momentum": Case(amos_with(last_axis, momentum=0.9), 0.1, 0.05, 0.1),
    "amos_clip": Case(amos_with(clip_value=0.5), 0.1, 0.05, 0.1),
    "amos_schedule": Case(amos_with_warm_up, 0.1, 0.05, 0.1),
    "sphere": Case(sphere_with(), 0.1, 0.05, 0.1),
    "sphere_reduced": Case(sphere_with(is_reduced=True), 0.1, 0.05, 0.1),
    "sphere_hidden": Case(sphere_with_blocks, 0.1, 0.05, 0.1),
    "muon": Case(muon_with, 0.1, 0.05, 0.1),
    "amos_later": Case(later_amos, 0.1, 0.05, 0.1),
    "sgd": Case(triple(classic.sgd), 0.1, 1e-3, 0.5),
    "momentum": Case(triple(classic.momentum, mass=0.9), 0.05, 2e-4, 0.1),
    "nesterov": Case(triple(classic.nesterov, mass=0.9), 0.05, 2e-4, 0.1),
    "adagrad": Case(triple(classic.adagrad), 0.5, 0.5, 0.3),
    "rmsprop": Case(triple(classic.rmsprop), 0.01, 0.003, 0.01),
    "rmsprop_momentum": Case(triple(classic.rmsprop_momentum), 0.003, 1e-3, 0.003),
    "adam": Case(triple(classic.adam), 0.1, 0.05, 0.05),
    "adamax": Case(triple(classic.adamax), 0.1, 0.05, 0.05),
    "sm3": Case(triple(classic.sm3), 0.5, 0.5, 0.3),
    "groups": Case(two_groups, 0.05, 2e-3, 0.05),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
# The later form of Amos has a number of steps in place of a rate.
with_rate = pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "amos_later"])
# Hidden kernels stay on their scale, wherever the minimum is.
_ON_THEIR_SCALE = ("muon", "sphere_hidden")
free_to_move = pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in _ON_THEIR_SCALE])
# The orthogonalisation of optax mixes dtypes, and tree_map_params fails within its partition.
without_optax = pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "muon"])
# Clipping is a transformation of optax in front, a schedule only sets the rate, and scalar slots
# are reduced ones: trees, sizes and devices take the same path as in the other variants.
_SAME_PATHS = ("amos_scalar", "amos_clip", "amos_schedule")
each_code_path = pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in _SAME_PATHS])


def test_all_classic_optimizers_are_covered():
    makers = {n for n in classic.__all__ if hasattr(getattr(classic, n), "__wrapped__")}
    assert len(makers) == 9
    assert makers <= set(OPTIMIZERS)


N_STEPS = 4
RATE = 0.05


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {
    "dense": {"bias": normal(0, 3), "kernel": normal(1, (8, 3))},
    "temperature": normal(2, ()),
}
GRADS = [
    jax.tree.map(lambda x, i=i: normal(10 * i + x.ndim, x.shape), PARAMS) for i in range(N_STEPS)
]


@functools.cache
def transformation(name):
    return OPTIMIZERS[name].make(RATE)


def step(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def run(stepper, params, state, all_grads=GRADS):
    for grads in all_grads:
        params, state = stepper(params, state, grads)
    return params, state


class Run(NamedTuple):
    """A compiled step, the result of a run of it, and the number of compilations."""

    stepper: Callable[..., Any]
    end: Any
    n_compilations: int


@functools.cache
def first_run(name):
    """Runs each optimizer once; tests of plain dicts share the compiled step."""
    tx = transformation(name)
    stepper = functools.partial(jax.jit(step, static_argnums=0), tx)
    state = tx.init(PARAMS)
    with count_compilations() as compiled:
        end = run(stepper, PARAMS, state)
    return Run(stepper, end, sum("step" in function for function in compiled.names))


def jitted_step(name):
    return first_run(name).stepper


def trajectory_end(name):
    return first_run(name).end


def assert_close(a, b, rtol=2e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)


@every_optimizer
def test_jit_and_op_by_op_agree_and_parameters_change(name):
    tx = transformation(name)
    params, state = run(functools.partial(step, tx), PARAMS, tx.init(PARAMS))
    assert_close((params, state), trajectory_end(name))
    for before, after in zip(jax.tree.leaves(PARAMS), jax.tree.leaves(params), strict=True):
        assert (before != after).all()


@every_optimizer
def test_scan_agrees_with_a_loop(name):
    tx = transformation(name)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *GRADS)
    body = lambda carry, grads: (step(tx, *carry, grads), None)
    params = jax.tree.map(jnp.asarray, PARAMS)
    end, _ = jax.jit(lambda p, s, g: jax.lax.scan(body, (p, s), g))(
        params, tx.init(params), stacked
    )
    assert_close(end, trajectory_end(name))


@every_optimizer
def test_vmap_trains_each_ensemble_member_separately(name):
    tx = transformation(name)
    stack = lambda *xs: jnp.stack(xs)
    members = [PARAMS, jax.tree.map(lambda x: 1.5 * x + 1, PARAMS)]
    params = jax.tree.map(stack, *members)
    states = jax.vmap(tx.init)(params)
    grads = jax.tree.map(stack, GRADS[0], GRADS[1])
    params, states = jax.jit(jax.vmap(functools.partial(step, tx)))(params, states, grads)
    for i, member in enumerate(members):
        alone = jitted_step(name)(member, tx.init(member), GRADS[i])
        assert_close(jax.tree.map(lambda x, i=i: x[i], (params, states)), alone)


@every_optimizer
def test_only_the_first_step_compiles(name):
    assert first_run(name).n_compilations == 1


@every_optimizer
def test_chain_passes_the_scaled_gradient(name):
    tx = transformation(name)
    chain = optax.chain(optax.scale(2.0), tx, optax.scale(0.5))
    updates, (_, state, _) = chain.update(GRADS[0], chain.init(PARAMS), PARAMS)
    doubled = jax.tree.map(lambda g: 2 * g, GRADS[0])
    expected, expected_state = tx.update(doubled, tx.init(PARAMS), PARAMS)
    assert_close(updates, jax.tree.map(lambda u: 0.5 * u, expected))
    assert_close(state, expected_state)


@every_optimizer
def test_masked_parameters_pass_through_and_have_no_slots(name):
    tx = transformation(name)
    masked = optax.masked(tx, {"dense": {"bias": True, "kernel": False}, "temperature": False})
    state = masked.init(PARAMS)
    assert not any(x.shape == (8, 3) for x in jax.tree.leaves(state))
    updates, _ = masked.update(GRADS[0], state, PARAMS)
    expected, _ = tx.update(GRADS[0], tx.init(PARAMS), PARAMS)
    assert_close(updates["dense"]["bias"], expected["dense"]["bias"])
    np.testing.assert_array_equal(updates["dense"]["kernel"], GRADS[0]["dense"]["kernel"])


@every_optimizer
def test_partition_into_two_groups_gives_the_same_updates(name):
    tx = transformation(name)
    labels = {"dense": {"bias": "a", "kernel": "b"}, "temperature": "b"}
    partition = optax.partition({"a": tx, "b": OPTIMIZERS[name].make(RATE)}, labels)
    updates, _ = partition.update(GRADS[0], partition.init(PARAMS), PARAMS)
    expected, _ = tx.update(GRADS[0], tx.init(PARAMS), PARAMS)
    assert_close(updates, expected)


@every_optimizer
def test_multi_steps_takes_one_step_with_the_mean_gradient(name):
    tx = transformation(name)
    steps = optax.MultiSteps(tx, every_k_schedule=2)
    update = jax.jit(steps.update)
    first, state = update(GRADS[0], steps.init(PARAMS), PARAMS)
    assert not any(x.any() for x in jax.tree.leaves(first))
    second, state = update(GRADS[1], state, PARAMS)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, GRADS[0], GRADS[1])
    expected, expected_state = tx.update(mean, tx.init(PARAMS), PARAMS)
    assert_close(second, expected)
    assert_close(state.inner_opt_state, expected_state)


@with_rate
def test_injected_rate_can_be_changed_during_training(name):
    tx = optax.inject_hyperparams(OPTIMIZERS[name].make)(learning_rate=RATE)
    state = tx.init(PARAMS)
    same, _ = tx.update(GRADS[0], state, PARAMS)
    plain = transformation(name)
    expected, _ = plain.update(GRADS[0], plain.init(PARAMS), PARAMS)
    assert_close(same, expected)
    state.hyperparams["learning_rate"] = jnp.float32(RATE / 2)
    halved, _ = tx.update(GRADS[0], state, PARAMS)
    half = OPTIMIZERS[name].make(RATE / 2)
    expected, _ = half.update(GRADS[0], half.init(PARAMS), PARAMS)
    assert_close(halved, expected)


@without_optax
def test_tree_map_params_separates_slots_from_counts(name):
    _, state = trajectory_end(name)
    kinds = optax.tree_map_params(
        transformation(name),
        lambda x: "slot",
        state,
        transform_non_params=lambda x: "number",
    )
    assert jax.tree.structure(kinds) == jax.tree.structure(state)
    for leaf_name, kind in zip(trees.leaf_names(state), jax.tree.leaves(kinds), strict=True):
        is_number = leaf_name[-1] in {"count", "rate"}
        assert kind == ("number" if is_number else "slot"), leaf_name


class NnxDense(nnx.Module):
    def __init__(self):
        self.bias = nnx.Param(jnp.asarray(PARAMS["dense"]["bias"]))
        self.kernel = nnx.Param(jnp.asarray(PARAMS["dense"]["kernel"]))


class NnxModel(nnx.Module):
    def __init__(self):
        self.dense = NnxDense()
        self.temperature = nnx.Param(jnp.asarray(PARAMS["temperature"]))
        self.n_calls = nnx.Variable(jnp.zeros((), jnp.int32))


@every_optimizer
def test_nnx_optimizer_agrees(name):
    model = NnxModel()
    optimizer = nnx.Optimizer(model, transformation(name), wrt=nnx.Param)
    template = nnx.state(model, nnx.Param)
    for grads in GRADS[:2]:
        optimizer.update(model, nnx.merge_state(tree_like(template, grads)))
    params, _ = run(jitted_step(name), PARAMS, transformation(name).init(PARAMS), GRADS[:2])
    assert_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)


def tree_like(template, tree):
    return jax.tree.unflatten(jax.tree.structure(template), jax.tree.leaves(tree))


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    bias: Any
    kernel: Any


@struct.dataclass
class FlaxRecord:
    bias: Any
    kernel: Any


class EquinoxLayer(eqx.Module):
    bias: jax.Array
    kernel: jax.Array
    activation: Callable = eqx.field(static=True, default=jax.nn.relu)


TREE_KINDS = {
    "frozen_dict": lambda a, b: FrozenDict({"bias": a, "kernel": b}),
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "named_tuple": Pair,
    "dataclass": Record,
    "flax_struct": FlaxRecord,
    "nnx_state": lambda a, b: nnx.State({"bias": nnx.Param(a), "kernel": nnx.Param(b)}),
    "nnx_pure_state": lambda a, b: nnx.State({"bias": a, "kernel": b}),
    "equinox": EquinoxLayer,
    "empty_nodes": lambda a, b: {"a": {}, "bias": a, "c": (), "kernel": b, "n": None},
    "masked_nodes": lambda a, b: {"bias": a, "kernel": b, "m": optax.MaskedNode()},
}


@each_code_path
def test_every_tree_kind_gives_the_same_bits(name):
    tx = transformation(name)
    stepper = jax.jit(functools.partial(step, tx))
    dense, dense_grads = PARAMS["dense"], GRADS[0]["dense"]
    params, state = stepper(dense, tx.init(dense), dense_grads)
    for kind, build in TREE_KINDS.items():
        kind_params = build(jnp.array(dense["bias"]), jnp.array(dense["kernel"]))
        kind_grads = tree_like(kind_params, dense_grads)
        state = tx.init(kind_params)
        new_params, _ = choose_step(stepper, tx, kind)(kind_params, state, kind_grads)
        assert jax.tree.structure(new_params) == jax.tree.structure(kind_params), kind
        assert_close(jax.tree.leaves(new_params), jax.tree.leaves(params))


def choose_step(stepper, tx, kind):
    # Only one kind is compiled: for the others, op by op is faster and checks the same code.
    return stepper if kind == "equinox" else functools.partial(step, tx)


@each_code_path
@pytest.mark.parametrize("shape", [(), (4,), (0, 3)], ids=str)
def test_single_arrays_and_numbers_are_accepted(name, shape):
    tx = transformation(name)
    params, grads = jnp.ones(shape), jnp.ones(shape)
    new, _ = step(tx, params, tx.init(params), grads)
    assert new.shape == shape
    assert (new < params).all()


@every_optimizer
def test_a_tree_without_parameters_is_accepted(name):
    tx = transformation(name)
    assert step(tx, {"a": None}, tx.init({"a": None}), {"a": None})[0] == {"a": None}


@every_optimizer
def test_bfloat16_parameters_have_float32_slots(name):
    tx = transformation(name)
    small = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
    state = tx.init(small(PARAMS))
    stepper = jax.jit(functools.partial(step, tx))
    params, new_state = stepper(small(PARAMS), state, small(GRADS[0]))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    dtypes = {x.dtype for x in jax.tree.leaves(new_state)} - {jnp.dtype(jnp.int32)}
    assert dtypes <= {jnp.dtype(jnp.float32)}
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, new_state)
    full, _ = jitted_step(name)(PARAMS, transformation(name).init(PARAMS), GRADS[0])
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(full), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.02, atol=0.02)


@without_optax
def test_strict_type_promotion_is_satisfied(name):
    tx = transformation(name)
    with jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.float32, jnp.bfloat16):
            params = {"bias": jnp.ones(3, dtype), "kernel": jnp.ones((8, 3), dtype)}
            new, _ = step(tx, params, tx.init(params), params)
            assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(dtype)}


@each_code_path
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-30, 1e-42])
def test_zero_and_tiny_gradients_give_finite_results(name, size):
    grads = jax.tree.map(lambda x: np.full(x.shape, size, np.float32), PARAMS)
    end = run(jitted_step(name), PARAMS, transformation(name).init(PARAMS), [grads] * 3)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(end))


@every_optimizer
def test_state_restored_by_flax_continues_with_the_same_bits(name):
    tx = transformation(name)
    params, state = run(jitted_step(name), PARAMS, tx.init(PARAMS), GRADS[:2])
    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(tx.init(PARAMS), data)
    assert_trees_equal(restored, state)
    restored = jax.tree.map(jnp.asarray, restored)
    end = run(jitted_step(name), params, restored, GRADS[2:])
    assert_trees_equal(end, trajectory_end(name))


def test_states_of_all_optimizers_survive_orbax(tmp_path):
    states = {name: trajectory_end(name)[1] for name in OPTIMIZERS}
    targets = {name: transformation(name).init(PARAMS) for name in OPTIMIZERS}
    assert_trees_equal(save_and_restore(tmp_path / "states", states, targets), states)


def test_packed_states_of_classic_optimizers_survive_orbax(tmp_path):
    makers = ["sgd", "adagrad", "rmsprop", "rmsprop_momentum", "adam", "adamax", "sm3"]
    family = {name: getattr(classic, name)(RATE) for name in makers}
    family |= {n: getattr(classic, n)(RATE, mass=0.9) for n in ("momentum", "nesterov")}
    initial = {name: triple.init_fn(PARAMS) for name, triple in family.items()}
    states = {n: triple.update_fn(0, GRADS[0], initial[n]) for n, triple in family.items()}
    # A `JoinPoint` is a leaf, as in JAX's own module: Orbax stores what is inside.
    unpacked, targets = (
        {n: classic.unpack_optimizer_state(state) for n, state in by_name.items()}
        for by_name in (states, initial)
    )
    subtrees, empty = (
        jax.tree.map(lambda point: point.subtree, by_name) for by_name in (unpacked, targets)
    )
    restored = save_and_restore(tmp_path / "packed", subtrees, empty)
    for name, state in states.items():
        points = jax.tree.map(lambda _, x: classic.JoinPoint(x), unpacked[name], restored[name])
        assert_trees_equal(classic.pack_optimizer_state(points), state)


def save_and_restore(path, tree, target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, target)


def minimize(tx, loss, params, n_steps):
    def body(carry, _):
        params, state = carry
        return step(tx, params, state, jax.grad(loss)(params)), None

    carry = (params, tx.init(params))
    (params, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=n_steps))(carry)
    return params


@free_to_move
def test_quadratic_is_minimized(name):
    target = {"kernel": jnp.float32([1.0, -2.0, 0.5]), "bias": jnp.float32(0.3)}
    scales = jnp.float32([0.5, 1.0, 2.0])

    def loss(params):
        difference = (params["kernel"] - target["kernel"]) * scales
        return jnp.sum(difference**2) + (params["bias"] - target["bias"]) ** 2

    start = jax.tree.map(jnp.zeros_like, target)
    tx = OPTIMIZERS[name].make(OPTIMIZERS[name].quadratic)
    end = minimize(tx, loss, start, 600)
    assert float(loss(end)) < 1e-3 * float(loss(start))


@free_to_move
def test_rosenbrock_function_is_minimized(name):
    loss = lambda params: (1 - params[0]) ** 2 + 100 * (params[1] - params[0] ** 2) ** 2
    start = [jnp.float32(-1.0), jnp.float32(1.0)]
    tx = OPTIMIZERS[name].make(OPTIMIZERS[name].rosenbrock)
    end = minimize(tx, loss, start, 6000)
    assert float(loss(start)) == 4.0
    assert float(loss(end)) < 0.1


@free_to_move
def test_small_classification_is_learned(name):
    x = normal(5, (96, 4))
    labels = np.argmax(x @ normal(6, (4, 3)), axis=1)

    def loss(params):
        hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        logits = hidden @ params["out"]["kernel"] + params["out"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    layer = lambda seed, n, m: {
        "kernel": jnp.asarray(normal(seed, (n, m)) / math.sqrt(n)),
        "bias": jnp.zeros(m),
    }
    start = {"hidden": layer(7, 4, 8), "out": layer(8, 8, 3)}
    tx = OPTIMIZERS[name].make(OPTIMIZERS[name].classification)
    end = minimize(tx, loss, start, 200)
    assert float(loss(start)) > 0.9
    assert float(loss(end)) < 0.35


@each_code_path
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
def test_eight_devices_give_the_result_of_one(name, axis_type):
    if name == "muon" and axis_type is AxisType.Explicit:
        pytest.skip("Products of sharded matrices in optax's Muon name no output sharding.")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    tx = transformation(name)
    expected = jitted_step(name)(PARAMS, tx.init(PARAMS), GRADS[0])

    def put(x):
        spec = P("data") if x.shape[:1] == (8,) else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    params, state, grads = jax.tree.map(put, (PARAMS, tx.init(PARAMS), GRADS[0]))
    with jax.set_mesh(mesh):
        params, state = jitted_step(name)(params, state, grads)
    assert params["dense"]["kernel"].sharding.shard_shape((8, 3)) == (1, 3)
    assert_close((params, state), expected, rtol=1e-5)
