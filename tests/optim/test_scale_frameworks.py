"""The same table for a model in four libraries; tables of common architectures."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from tekoa.optim.scales import auto
from tekoa.optim.scales.auto import scales_of_function

pytestmark = pytest.mark.slow


def images():
    return np.random.default_rng(0).random((4, 8, 8, 3)).astype(np.float32)


def tokens(vocab=50):
    return np.random.default_rng(0).integers(0, vocab, (4, 12))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(6, (3, 3), name="conv")(x)).reshape(x.shape[0], -1)
        x = nn.LayerNorm(name="norm")(nn.Dense(10, name="dense")(x))
        return nn.Dense(4, name="head")(nn.gelu(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 6, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(384, 10, rngs=rngs)
        self.norm = nnx.LayerNorm(10, rngs=rngs)
        self.head = nnx.Linear(10, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x)).reshape(x.shape[0], -1)
        return self.head(nnx.gelu(self.norm(self.dense(x))))


class EquinoxNet(eqx.Module):
    conv: eqx.nn.Conv2d
    dense: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        self.conv = eqx.nn.Conv2d(3, 6, 3, padding="SAME", key=key)
        self.dense = eqx.nn.Linear(384, 10, key=key)
        self.norm = eqx.nn.LayerNorm(10)
        self.head = eqx.nn.Linear(10, 4, key=key)

    def __call__(self, x):
        x = jax.nn.relu(self.conv(jnp.moveaxis(x, -1, 0)))
        x = jnp.moveaxis(x, 0, -1).reshape(-1)
        return self.head(jax.nn.gelu(self.norm(self.dense(x))))


def linen_table():
    return linen_scales(LinenNet(), images())


def nnx_table():
    graph, params = nnx.split(nnx.eval_shape(lambda: NnxNet(nnx.Rngs(1))), nnx.Param)
    return scales_of_function(lambda p, x: nnx.merge(graph, p)(x), params, images())


def equinox_table():
    model = eqx.filter_eval_shape(EquinoxNet, jax.random.key(2))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return scales_of_function(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params, images())


def function_table():
    def model(p, x):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, p["conv"]["kernel"], (1, 1), "SAME", (1, 1), (1, 1), dims
        )
        x = jax.nn.relu(x + p["conv"]["bias"]).reshape(len(x), -1)
        x = x @ p["dense"]["kernel"] + p["dense"]["bias"]
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = jax.nn.gelu(x * p["norm"]["scale"] + p["norm"]["bias"])
        return x @ p["head"]["kernel"] + p["head"]["bias"]

    params = jax.eval_shape(LinenNet().init, jax.random.key(3), images())["params"]
    return scales_of_function(model, params, images())


def sorted_rows(table):
    rename = {"weight": "kernel"}
    rows = {}
    for row in table:
        part, leaf = row.name
        leaf = "scale" if (part, leaf) == ("norm", "weight") else rename.get(leaf, leaf)
        rows[f"{part}/{leaf}"] = row
    return dict(sorted(rows.items()))


@pytest.mark.parametrize("table", [nnx_table, equinox_table, function_table])
def test_every_library_gives_the_table_of_linen(table):
    linen, other = sorted_rows(linen_table()), sorted_rows(table())
    expected = {name: row.eta for name, row in linen.items()}
    assert {name: row.eta for name, row in other.items()} == pytest.approx(expected, rel=1e-3)
    for name, row in linen.items():
        # Equinox has outputs first; the slots are the same numbers.
        assert math.prod(other[name].slot_shape) == math.prod(row.slot_shape)


def test_names_match_those_of_the_optimizer():
    graph, shapes = nnx.split(nnx.eval_shape(lambda: NnxNet(nnx.Rngs(1))), nnx.Param)
    tx = auto.amos_for(lambda p, x: nnx.merge(graph, p)(x), shapes, images(), n_batches=10)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape), shapes)
    assert jax.tree.leaves(tx.init(params).v["dense"]["kernel"])[0].shape == (1, 10)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(y, mask=mask)
        y = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1], name="narrow")(nn.gelu(nn.Dense(64, name="wide")(y))), None


class Transformer(nn.Module):
    is_scanned: bool = False

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(50, 32, name="embed")
        x = embed(ids) + self.param("position", nn.initializers.normal(), (12, 32))
        if self.is_scanned:
            layers = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = layers(name="layers")(x, None)
        else:
            for i in range(2):
                x, _ = Block(name=f"layer_{i}")(x)
        return embed.attend(nn.RMSNorm(name="final")(x))


def linen_scales(model, *batch):
    params = jax.eval_shape(model.init, jax.random.key(0), *batch)["params"]
    return scales_of_function(lambda p, *b: model.apply({"params": p}, *b), params, *batch)


def test_all_parameters_of_a_transformer_are_placed():
    table = linen_scales(Transformer(), tokens())
    assert not table.unplaced
    attention = "layer_1/attention"
    for name in ("query", "key", "value"):
        assert table[f"{attention}/{name}/kernel"].eta == pytest.approx(32**-0.5, rel=0.02)
        assert table[f"{attention}/{name}/kernel"].slot_shape == (1, 4, 8)
        assert table[f"{attention}/{name}/bias"].eta == pytest.approx(0.5, rel=0.02)
    assert table[f"{attention}/out/kernel"].slot_shape == (1, 1, 32)
    assert table[f"{attention}/out/kernel"].eta == pytest.approx(32**-0.5, rel=0.1)
    assert table["layer_0/wide/kernel"].eta == pytest.approx(32**-0.5, rel=0.02)
    assert table["layer_0/wide/kernel"].slot_shape == (1, 64)
    # gelu of a unit normal has mean square 0.425.
    assert table["layer_0/narrow/kernel"].eta == pytest.approx((64 * 0.425) ** -0.5, rel=0.05)
    assert table["layer_0/LayerNorm_0/scale"].eta == 1
    assert table["final/scale"].eta == 1
    assert math.prod(table["position"].slot_shape) == 12


def test_tied_embedding_gets_the_smaller_scale_and_reports_it():
    row = linen_scales(Transformer(), tokens())["embed/embedding"]
    assert row.eta == pytest.approx(32**-0.5, rel=0.02)
    assert row.slot_shape == (50, 1)
    assert "tied" in row.reason
    assert "looked up (1)" in row.reason


def test_scan_over_layers_gives_each_slice_the_scale_of_its_layer():
    unrolled = linen_scales(Transformer(), tokens())
    scanned = linen_scales(Transformer(is_scanned=True), tokens())
    for row in unrolled:
        if row.name[0] not in ("layer_0", "layer_1"):
            continue
        stacked = scanned["/".join(("layers", *row.name[1:]))]
        layer = int(row.name[0][-1])
        by_slice = np.broadcast_to(scanned.eta_fn(stacked.name, stacked.shape), stacked.shape)
        assert by_slice[layer].flat[0] == pytest.approx(row.eta, rel=0.05)
        assert stacked.slot_shape == (2, *(row.slot_shape or (1,) * len(row.shape)))


class Recurrent(nn.Module):
    cell: type

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(50, 16, name="embed")
        return embed.attend(nn.RNN(self.cell(16), name="rnn")(embed(ids)))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.SimpleCell])
def test_all_parameters_of_a_recurrent_model_are_placed(cell):
    table = linen_scales(Recurrent(cell), tokens())
    assert not table.unplaced
    kernels = [row for row in table if row.name[-1] == "kernel"]
    assert {row.slot_shape for row in kernels} == {(1, 16)}
    # States are below 1, so their kernels are above 1/sqrt(16).
    assert all(0.2 < row.eta < 8 for row in kernels)
    assert {row.slot_shape for row in table if row.name[-1] == "bias"} == {()}


@pytest.mark.parametrize("shapes_only", [False, True])
def test_norms_and_convolutions_of_all_kinds(shapes_only):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=True)(nn.Conv(8, (3, 3))(x))
            x = nn.GroupNorm(2)(nn.Conv(8, (3, 3), feature_group_count=8, name="depthwise")(x))
            x = nn.ConvTranspose(4, (3, 3), strides=(2, 2), name="up")(nn.relu(x))
            return nn.Einsum((4, 5), "bhwi,io->bhwo", name="einsum")(x)

    model, x = Net(), images()
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    rest = {"batch_stats": {"BatchNorm_0": {"mean": np.zeros(8, "f"), "var": np.ones(8, "f")}}}
    batch = jax.ShapeDtypeStruct(x.shape, x.dtype) if shapes_only else x
    table = scales_of_function(lambda p, x: model.apply({"params": p, **rest}, x), params, batch)
    assert not table.unplaced
    assert table["BatchNorm_0/scale"].eta == table["GroupNorm_0/scale"].eta == 1
    assert table["depthwise/kernel"].slot_shape == (1, 1, 1, 8)
    assert table["depthwise/kernel"].eta == pytest.approx(1 / 3, rel=0.05)  # Nine unit terms.
    # A stride of 2 x 2 leaves a quarter of 9 x 8 terms, each with mean square 1/2 after ReLU.
    assert table["up/kernel"].eta == pytest.approx((18 * 0.5) ** -0.5, rel=0.05)
    assert table["einsum/kernel"].eta == pytest.approx(0.5, rel=0.02)  # Four unit terms.


def shift_norm(x, shift):
    x = x - shift
    x = x - x.mean(-1, keepdims=True)
    size = jnp.square(x).mean(-1, keepdims=True) * math.sqrt(x.shape[-1])
    return x * jax.lax.rsqrt(jnp.maximum(size, 1.0))


def lstm(p, ids):
    """The LSTM published with Amos, without dropout."""

    def cell(carry, x):
        recurrent, memory = carry
        joined = shift_norm(jnp.concatenate([recurrent, x], -1), p["shift"])
        a, b, g, o = jnp.moveaxis(
            jnp.einsum("bi,igm->bgm", joined, p["core"]) + p["core_bias"], 1, 0
        )
        gate = jax.nn.sigmoid(1 - g)
        b = jnp.clip(jnp.tanh(b) / (1 + math.e), -gate, gate)
        memory = memory * (1 - gate) + b * 2 * jax.nn.silu(a)
        out = shift_norm(memory, p["cell_shift"]) * 2 * jax.nn.sigmoid(o)
        return ((out := out @ p["out"] + p["out_bias"]), memory), out

    start = jnp.zeros((len(ids), p["out"].shape[1])), jnp.zeros((len(ids), p["out"].shape[0]))
    _, outs = jax.lax.scan(cell, start, p["embedding"][ids].swapaxes(0, 1))
    return outs.swapaxes(0, 1) @ p["embedding"].T + p["bias"]


def test_lstm_published_with_amos_gets_its_manual_scales():
    h, m = 64, 256
    manual = {
        "bias": ((50,), 0.5),
        "core": ((2 * h, 4, m), (2 * h) ** -0.25),
        "embedding": ((50, h), h**-0.25),
        "out": ((m, h), (m * h) ** -0.25),
        "out_bias": ((h,), 0.5 * h**-0.25),
        "shift": ((2 * h,), 0.5 * h**-0.25),
    }
    shapes = {name: shape for name, (shape, _) in manual.items()}
    shapes |= {"core_bias": (4, m), "cell_shift": (m,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    ids = np.random.default_rng(0).integers(0, 50, (8, 64))
    table = scales_of_function(lstm, params, ids)
    assert not table.unplaced
    for name, (_, eta) in manual.items():
        assert table[name].eta == pytest.approx(eta, rel=0.15), table[name]
    assert table["embedding"].slot_shape == (50, 1)
    assert table["core"].slot_shape == (1, 4, m)
    # Its manual scale is 0.5, as the memory grows over more steps than one sequence has.
    assert 0.05 < table["cell_shift"].eta <= 0.5
