"""`scales_of_function` and `amos_for` on models small enough to check by hand."""

import gzip
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tekoa
from support import files
from tekoa.optim.amos import transform
from tekoa.optim.scales import auto
from tekoa.optim.scales.auto import scales_of_function

# The scales that the authors of Amos chose manually for this network.
MANUAL = {
    "Conv_0/kernel": math.sqrt(8 / 9),
    "Conv_1/kernel": math.sqrt(2 / 288),
    "Dense_0/kernel": math.sqrt(2 / 3136),
    "Dense_1/kernel": math.sqrt(1 / 256),
    "Conv_0/bias": 0.5,
    "Conv_1/bias": 0.5,
    "Dense_0/bias": 0.5,
    "Dense_1/bias": 0.5,
}


class CNN(nn.Module):
    pool: str = "avg_pool"

    @nn.compact
    def __call__(self, x):
        pool = getattr(nn, self.pool)
        for features in (32, 64):
            x = pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def cnn(pool="avg_pool"):
    model = CNN(pool)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 28, 28, 1)))["params"]
    return (lambda params, x: model.apply({"params": params}, x)), shapes


def digits(n=64):
    """Blobs with the mean square of MNIST's pixels, 0.1307**2 + 0.3081**2."""
    coarse = np.random.default_rng(0).random((n, 7, 7, 1)) < 0.1120
    return coarse.repeat(4, axis=1).repeat(4, axis=2).astype(np.float32)


def mlp(params, x):
    x = jax.nn.relu(x @ params["a"] + params["b"])
    return jnp.tanh(x @ params["c"]) @ params["d"]


def mlp_params():
    shapes = {"a": (16, 32), "b": (32,), "c": (32, 24), "d": (24, 2)}
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def etas(table):
    return {"/".join(row.name): row.eta for row in table}


@pytest.mark.parametrize("pool", ["avg_pool", "max_pool"])
@pytest.mark.parametrize("source", ["blobs", "mnist"])
def test_mnist_cnn_is_near_the_manual_scales(pool, source):
    images = digits()
    if source == "mnist":
        packed = files.data_set("mnist") / "t10k-images-idx3-ubyte.gz"
        raw = np.frombuffer(gzip.decompress(packed.read_bytes())[16:], np.uint8)
        images = raw[: 64 * 784].reshape(64, 28, 28, 1) / np.float32(255)
    table = scales_of_function(*cnn(pool), images)
    for name, manual in MANUAL.items():
        assert manual / 1.6 < table[name].eta < manual * 1.6, (name, table[name])
    assert not table.unplaced


def test_mnist_cnn_has_one_slot_per_output():
    table = scales_of_function(*cnn(), digits(4))
    assert {"/".join(row.name): row.slot_shape for row in table} == {
        "Conv_0/kernel": (1, 1, 1, 32),
        "Conv_1/kernel": (1, 1, 1, 64),
        "Dense_0/kernel": (1, 256),
        "Dense_1/kernel": (1, 10),
        "Conv_0/bias": (),
        "Conv_1/bias": (),
        "Dense_0/bias": (),
        "Dense_1/bias": (),
    }


def test_only_the_first_kernel_depends_on_the_scale_of_the_input():
    fn, params = cnn()
    images = digits(16)
    small, large = (etas(scales_of_function(fn, params, s * images)) for s in (1, 10))
    assert small.pop("Conv_0/kernel") == pytest.approx(10 * large.pop("Conv_0/kernel"), rel=1e-5)
    assert small == pytest.approx(large, rel=1e-4)


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.checkpoint, lambda f: jax.vmap(f, (None, 0)), lambda f: jax.jit(jax.remat(f))],
    ids=["jit", "remat", "vmap", "jit of remat"],
)
def test_table_is_unchanged_by(wrap):
    x = data(64, 16)
    plain = etas(scales_of_function(mlp, mlp_params(), x))
    assert etas(scales_of_function(wrap(mlp), mlp_params(), x)) == pytest.approx(plain, rel=1e-5)


def test_shapes_alone_give_the_table_of_unit_data():
    x = data(256, 16)
    real = scales_of_function(mlp, mlp_params(), x)
    shapes = jax.eval_shape(lambda: (mlp_params(), x))
    table = scales_of_function(mlp, shapes[0], shapes[1])
    assert etas(table) == pytest.approx(etas(real), rel=0.05)
    assert [row.slot_shape for row in table] == [row.slot_shape for row in real]


def test_values_of_the_parameters_do_not_matter():
    x = data(8, 16)
    noise = jax.tree.map(lambda p: p + 7.0, mlp_params())
    assert etas(scales_of_function(mlp, noise, x)) == etas(scales_of_function(mlp, mlp_params(), x))


def test_shapes_suffice_for_a_model_with_billions_of_parameters():
    width, n_layers = 4096, 24

    def layer(x, p):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(width)) @ v @ p["out"]
        return x + jax.nn.silu(x @ p["wide"]) @ p["narrow"], None

    def model(p, tokens):
        return jax.lax.scan(layer, p["embedding"][tokens], p["layers"])[0] @ p["head"]

    def bf16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {
        "embedding": bf16(32000, width),
        "head": bf16(width, 32000),
        "layers": {
            "qkv": bf16(n_layers, width, 3 * width),
            "out": bf16(n_layers, width, width),
            "wide": bf16(n_layers, width, 4 * width),
            "narrow": bf16(n_layers, 4 * width, width),
        },
    }
    tokens = jax.ShapeDtypeStruct((8, 2048), jnp.int32)
    table = scales_of_function(model, params, tokens)
    assert not table.unplaced
    assert table["layers/wide"].slot_shape == (n_layers, 1, 4 * width)
    assert table["embedding"].slot_shape == (32000, 1)


def test_static_arguments_and_keys_are_accepted():
    def model(p, x, key, is_training, rate):
        mask = jax.random.bernoulli(key, 1 - rate, x.shape)
        return jnp.where(mask, x / (1 - rate), 0) @ p["w"] if is_training else x @ p["w"]

    params = {"w": jnp.zeros((16, 3))}
    ones, key = jnp.ones((512, 16)), jax.random.key(0)
    with_dropout = scales_of_function(model, params, ones, key, True, 0.5)["w"].eta
    without_dropout = scales_of_function(model, params, ones, key, False, 0.5)["w"].eta
    assert without_dropout == pytest.approx(0.25)  # 1 / sqrt(16)
    assert with_dropout == pytest.approx(0.25 / math.sqrt(2), rel=0.05)  # Half the inputs, doubled.


def test_amos_for_derives_the_rate_from_the_number_of_batches():
    params, x = mlp_params(), data(8, 16)
    table = scales_of_function(mlp, params, x)
    manual = transform.amos(1 / 20, table.eta_fn, table.shape_fn)
    grads = jax.tree.map(jnp.ones_like, params)
    for tx in (manual, auto.amos_for(mlp, params, x, n_batches=400)):
        updates, _ = tx.update(grads, tx.init(params), params)
        assert float(updates["b"][0]) == pytest.approx(-0.5 / 20, rel=1e-4)


def test_amos_for_lets_rules_override_the_model():
    params = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}
    tx = auto.amos_for(
        lambda p, x: x @ p["w"] + p["b"],
        params,
        jnp.ones((3, 4)),
        n_batches=1,
        learning_rate=0.1,
        eta={"b": "1 / SHAPE[0]"},
        slot_shape={"w": (1, 1)},
        beta=0.9,
    )
    state = tx.init(params)
    assert state.v["w"].shape == (1, 1)
    assert state.v["b"].shape == ()
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    np.testing.assert_allclose(updates["b"], -0.1 * 0.5, rtol=1e-5)
    np.testing.assert_allclose(updates["w"], -0.1 * 0.5, rtol=1e-5)  # 1 / sqrt(4), from the model.


def test_amos_for_accepts_a_module_with_apply_and_several_arguments():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((2, 4)))
    bare = auto.amos_for(model, params["params"], jnp.ones((2, 4)), n_batches=9)
    assert bare.init(params["params"]).v["kernel"].shape == (1, 3)
    with_collections = auto.amos_for(model, params, (jnp.ones((2, 4)),), n_batches=9)
    assert with_collections.init(params).v["params"]["kernel"].shape == (1, 3)


def test_amos_for_trains():
    x, target = data(32, 16), data(32, 2, seed=1)
    params = jax.tree.map(lambda p: 0.1 * data(*p.shape), mlp_params())

    def loss(p):
        return jnp.mean((mlp(p, x) - target) ** 2)

    tx = auto.amos_for(mlp, params, x, n_batches=100, beta=0.9)
    step = jax.jit(lambda p, s: tx.update(jax.grad(loss)(p), s, p))
    state, start = tx.init(params), float(loss(params))
    for _ in range(60):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
    assert float(loss(params)) < 0.5 * start


def test_n_batches_must_be_positive():
    with pytest.raises(ValueError, match="n_batches must be positive, got 0"):
        auto.amos_for(mlp, mlp_params(), data(8, 16), n_batches=0)


def test_amos_for_refuses_other_models_and_names_find_scales():
    with pytest.raises(
        TypeError, match=r"fn\(params, \*batch\) or a module.*got int.*tekoa.find_scales"
    ):
        auto.amos_for(3, mlp_params(), data(8, 16), n_batches=1)


def test_amos_for_refuses_a_callable_module_and_names_find_scales():
    module = nnx.Linear(16, 2, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"cannot be traced.*tekoa.find_scales\(model, loss, batch"
    ):
        auto.amos_for(module, nnx.state(module, nnx.Param), data(8, 16), n_batches=1)


def test_trace_error_of_a_function_does_not_name_find_scales():
    with pytest.raises(ValueError, match=r"arguments of fn\(params, \*batch\)\.$"):
        auto.amos_for(mlp, mlp_params(), data(8, 5), n_batches=1)


def test_unused_parameter_is_listed_with_the_reason():
    params = mlp_params() | {"spare": jnp.full((3, 4), 2.0)}
    row = scales_of_function(mlp, params, data(8, 16))["spare"]
    assert not row.placed
    assert "output does not depend on it" in row.reason
    assert row.eta == pytest.approx(2.0)  # Its initial rms.


def test_output_that_depends_on_no_parameter_is_an_error():
    with pytest.raises(ValueError, match="does not depend on any parameter"):
        scales_of_function(lambda p, x: x * 2, mlp_params(), data(8, 16))


def test_former_name_is_an_alias():
    assert tekoa.scales is tekoa.optim.scales.scales is scales_of_function
