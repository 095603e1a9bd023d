"""Roles of common architectures in Linen, NNX and Equinox, against tables written by hand.

A role is written as kind, one letter per axis (contracted, free, batched), and hidden or
output. Only shapes are passed, so that nothing is compiled at the size of a model.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from tekoa.bridges.scales import find_scales

IMAGES = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((2, 6), jnp.int32)
ROWS = jax.ShapeDtypeStruct((2, 6), jnp.float32)
SEQUENCES = jax.ShapeDtypeStruct((2, 5, 6), jnp.float32)

HIDDEN, OUTPUT = "contracted cf hidden", "contracted cf output"
BIAS, LAST_BIAS = "added f hidden", "added f output"


def total(*outputs):
    return sum(jnp.sum(out**2) for out in jax.tree.leaves(outputs))


def roles_of(model, inputs):
    table = find_scales(model, total, (inputs, ()))
    return {"/".join(row.name): f"{row.role.kind} {row.role}" for row in table}


def init(key, shape):
    return jax.random.normal(key, shape)


class LinenConvolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), name="first")(x))
        x = nn.Conv(8, (3, 3), feature_group_count=2, use_bias=False, name="grouped")(x)
        x = nn.Conv(8, (3, 3), feature_group_count=8, use_bias=False, name="depthwise")(x)
        x = nn.ConvTranspose(4, (3, 3), strides=(2, 2), name="up")(nn.relu(x))
        return nn.Conv(1, (1, 1), name="last")(x)


class NnxConvolutions(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        groups = {"use_bias": False, "rngs": rngs}
        self.grouped = nnx.Conv(8, 8, (3, 3), feature_group_count=2, **groups)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, **groups)
        self.up = nnx.ConvTranspose(8, 4, (3, 3), strides=(2, 2), rngs=rngs)
        self.last = nnx.Conv(4, 1, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = self.depthwise(self.grouped(nnx.relu(self.first(x))))
        return self.last(self.up(nnx.relu(x)))


CONVOLUTIONS = {
    "first/kernel": "contracted cccf hidden",
    "first/bias": BIAS,
    "grouped/kernel": "contracted cccf hidden",
    "depthwise/kernel": "contracted cccb hidden",
    "up/kernel": "contracted cccf hidden",
    "up/bias": BIAS,
    "last/kernel": "contracted cccf output",
    "last/bias": LAST_BIAS,
}


class LinenNorms(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), use_bias=False, name="conv")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True, name="batch")(x))
        x = nn.GroupNorm(2, name="group")(x) + x
        x = nn.RMSNorm(name="rms")(nn.LayerNorm(name="layer")(x.mean((1, 2))))
        return nn.Dense(3, name="head")(x)


class NnxNorms(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 8, (3, 3), use_bias=False, rngs=rngs)
        self.batch = nnx.BatchNorm(8, rngs=rngs)
        self.group = nnx.GroupNorm(8, 2, rngs=rngs)
        self.layer, self.rms = nnx.LayerNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.batch(self.conv(x)))
        x = self.group(x) + x
        return self.head(self.rms(self.layer(x.mean((1, 2)))))


NORMS = {
    "conv/kernel": "contracted cccf hidden",
    **dict.fromkeys(["batch/scale", "group/scale"], "multiplied f hidden"),
    **dict.fromkeys(["layer/scale", "rms/scale"], "multiplied f hidden"),
    **dict.fromkeys(["batch/bias", "group/bias", "layer/bias"], BIAS),
    "head/kernel": OUTPUT,
    "head/bias": LAST_BIAS,
}


class LinenAttention(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(9, 8, name="embed")(ids)
        x = x + self.param("position", init, (6, 8))
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="norm")(x))
        return nn.Dense(9, name="head")(x)


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(9, 8, rngs=rngs)
        self.position = nnx.Param(init(rngs.params(), (6, 8)))
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.head = nnx.Linear(8, 9, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.position[...]
        return self.head(x + self.attention(self.norm(x)))


ATTENTION = {
    "embed/embedding": "looked up cf hidden",
    "position": "added ff hidden",
    "norm/scale": "multiplied f hidden",
    "norm/bias": BIAS,
    **{f"attention/{name}/kernel": "contracted cff hidden" for name in ("query", "key", "value")},
    **{f"attention/{name}/bias": "added ff hidden" for name in ("query", "key", "value")},
    "attention/out/kernel": "contracted ccf hidden",
    "attention/out/bias": BIAS,
    "head/kernel": OUTPUT,
    "head/bias": LAST_BIAS,
}


def fused_attention(x, qkv, out):
    q, k, v = jnp.split(x @ qkv, 3, axis=-1)
    heads = lambda x: x.reshape(*x.shape[:-1], 2, -1)
    weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", heads(q), heads(k)))
    return jnp.einsum("bhqt,bthk->bqhk", weights, heads(v)).reshape(x.shape) @ out


class LinenFused(nn.Module):
    @nn.compact
    def __call__(self, x):
        qkv, out = self.param("qkv", init, (6, 18)), self.param("out", init, (6, 6))
        return nn.Dense(2, use_bias=False, name="head")(fused_attention(x, qkv, out))


class NnxFused(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Param(init(rngs.params(), (6, 18)))
        self.out = nnx.Param(init(rngs.params(), (6, 6)))
        self.head = nnx.Linear(6, 2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(fused_attention(x, self.qkv[...], self.out[...]))


FUSED = {"qkv": HIDDEN, "out": HIDDEN, "head/kernel": OUTPUT}


def experts_by_einsum(x, router, wide, narrow):
    weights = jax.nn.softmax(x @ router)
    y = jax.nn.relu(jnp.einsum("ebi,eih->ebh", jnp.einsum("be,bi->ebi", weights, x), wide))
    return jnp.einsum("be,ebo->bo", weights, jnp.einsum("ebh,eho->ebo", y, narrow))


def experts_by_gather(x, router, wide, narrow):
    scores = x @ router
    best = jnp.argmax(scores, -1)
    x = jax.nn.relu(jnp.einsum("bi,bih->bh", x, wide[best]))
    return jnp.einsum("bh,bho->bo", x, narrow[best]) * jax.nn.softmax(scores).max(-1)[:, None]


SHAPES = {"router": (6, 3), "wide": (3, 6, 8), "narrow": (3, 8, 4)}


def linen_function(fn, shapes):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return fn(x, **{name: self.param(name, init, shape) for name, shape in shapes.items()})

    return Model()


def nnx_function(fn, shapes):
    class Model(nnx.Module):
        def __init__(self, rngs):
            for name, shape in shapes.items():
                setattr(self, name, nnx.Param(init(rngs.params(), shape)))

        def __call__(self, x):
            return fn(x, **{name: getattr(self, name)[...] for name in shapes})

    return Model(nnx.Rngs(0))


def both(fn, **shapes):
    return [lambda: linen_function(fn, shapes), lambda: nnx_function(fn, shapes)]


def scanned_stack(x, stack, head):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, stack)
    return x @ head


def tied_embedding(ids, table, body):
    return jnp.tanh(table[ids] @ body) @ table.T


def adapters(x, base, a, b, head):
    return jax.nn.relu(x @ base + (x @ a) @ b) @ head


def merged_adapters(x, a, b, head):
    return jax.nn.relu(x @ (jnp.eye(6, 8) + a @ b)) @ head


def bilinear(x, w, head):
    return jnp.einsum("bi,bj,ijk->bk", x, jnp.flip(x, 0), w) @ head


def ensemble(x, first, second):
    return jax.vmap(lambda a, b: jax.nn.relu(x @ a) @ b)(first, second)


def mixer(x, tokens, channels, head):
    x = x + jnp.einsum("bti,ts->bsi", x, tokens)
    return (x + x @ channels).mean(1) @ head


def gated(x, gate, value, out):
    return (jax.nn.silu(x @ gate) * (x @ value)) @ out


def class_token(x, token, body, head):
    x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, 6)), x], 1)
    return jnp.tanh(x @ body)[:, 0] @ head


def joined_kernels(x, q, k, v, out):
    a, b, c = jnp.split(x @ jnp.concatenate([q, k, v], 1), 3, -1)
    return (a * jax.nn.softmax(b) * c) @ out


class LinenRecurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.OptimizedLSTMCell(8), name="lstm")(x)
        x = nn.RNN(nn.GRUCell(8), name="gru")(x)
        return nn.Dense(2, name="head")(x)


AGAIN = "contracted cf hidden recurrent"
LSTM = {f"h{gate}/kernel": AGAIN for gate in "ifgo"} | {f"h{gate}/bias": BIAS for gate in "ifgo"}
RECURRENT = {
    **{f"OptimizedLSTMCell_0/{name}": role for name, role in LSTM.items()},
    **{f"OptimizedLSTMCell_0/i{gate}/kernel": HIDDEN for gate in "ifgo"},
    **{f"GRUCell_0/i{gate}/kernel": HIDDEN for gate in "rzn"},
    **{f"GRUCell_0/i{gate}/bias": BIAS for gate in "rzn"},
    **{f"GRUCell_0/h{gate}/kernel": AGAIN for gate in "rzn"},
    "GRUCell_0/hn/bias": BIAS,
    "head/kernel": OUTPUT,
    "head/bias": LAST_BIAS,
}


class NnxRecurrent(nnx.Module):
    def __init__(self, rngs):
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(6, 8, rngs=rngs), rngs=rngs)
        self.gru = nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.gru(self.lstm(x)))


# In NNX, the gates of a cell share one kernel.
NNX_RECURRENT = {
    "lstm/cell/dense_i/kernel": HIDDEN,
    "lstm/cell/dense_h/kernel": AGAIN,
    "lstm/cell/dense_h/bias": BIAS,
    "gru/cell/dense_i/kernel": HIDDEN,
    "gru/cell/dense_i/bias": BIAS,
    "gru/cell/dense_h/kernel": AGAIN,
    "head/kernel": OUTPUT,
    "head/bias": LAST_BIAS,
}


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(6, name="dense")(nn.LayerNorm(name="norm")(x)), None


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(LinenBlock, length=3, **axes)(name="layers")(x, None)
        return nn.Dense(2, use_bias=False, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dense = nnx.LayerNorm(6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return x + self.dense(self.norm(x))


class NnxScanned(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(NnxBlock, in_axes=0, out_axes=0))(rngs)
        self.head = nnx.Linear(6, 2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        layers = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(layers(lambda x, layer: layer(x))(x, self.layers))


SCANNED = {
    "layers/norm/scale": "multiplied bf hidden",
    "layers/norm/bias": "added bf hidden",
    "layers/dense/kernel": "contracted bcf hidden",
    "layers/dense/bias": "added bf hidden",
    "head/kernel": OUTPUT,
}


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(9, 8, name="embed")
        return embed.attend(jnp.tanh(nn.Dense(8, use_bias=False, name="body")(embed(ids))))


class NnxTied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(9, 8, rngs=rngs)
        self.body = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        return self.embed.attend(jnp.tanh(self.body(self.embed(ids))))


TIED = {"embed/embedding": "contracted fc output tied", "body/kernel": HIDDEN}

EXPERTS = {
    "router": HIDDEN,
    "wide": "contracted bcf hidden",
    "narrow": "contracted bcf output",
}
MODELS = {
    "convolutions": (
        [LinenConvolutions, lambda: NnxConvolutions(nnx.Rngs(0))],
        IMAGES,
        [CONVOLUTIONS, CONVOLUTIONS],
    ),
    "norms": ([LinenNorms, lambda: NnxNorms(nnx.Rngs(0))], IMAGES, [NORMS, NORMS]),
    "attention": (
        [LinenAttention, lambda: NnxAttention(nnx.Rngs(0))],
        TOKENS,
        [ATTENTION, ATTENTION],
    ),
    "fused_qkv": ([LinenFused, lambda: NnxFused(nnx.Rngs(0))], SEQUENCES, [FUSED, FUSED]),
    "recurrent": (
        [LinenRecurrent, lambda: NnxRecurrent(nnx.Rngs(0))],
        SEQUENCES,
        [RECURRENT, NNX_RECURRENT],
    ),
    "scanned_layers": (
        [LinenScanned, lambda: NnxScanned(nnx.Rngs(0))],
        ROWS,
        [SCANNED, SCANNED],
    ),
    "tied_layers": ([LinenTied, lambda: NnxTied(nnx.Rngs(0))], TOKENS, [TIED, TIED]),
}
FUNCTIONS = {
    "experts_by_einsum": (experts_by_einsum, ROWS, SHAPES, EXPERTS),
    "experts_by_gather": (
        experts_by_gather,
        ROWS,
        SHAPES,
        # Here the choice of an expert has no gradient; the router only weighs the output.
        {**EXPERTS, "router": OUTPUT},
    ),
    "scanned_stack": (
        scanned_stack,
        ROWS,
        {"stack": (3, 6, 6), "head": (6, 2)},
        {"stack": "contracted bcf hidden", "head": OUTPUT},
    ),
    "tied_embedding": (
        tied_embedding,
        TOKENS,
        {"table": (9, 8), "body": (8, 8)},
        {"table": "contracted fc output tied", "body": HIDDEN},
    ),
    "adapters": (
        adapters,
        ROWS,
        {"base": (6, 8), "a": (6, 2), "b": (2, 8), "head": (8, 3)},
        {"base": HIDDEN, "a": HIDDEN, "b": HIDDEN, "head": OUTPUT},
    ),
    "merged_adapters": (
        merged_adapters,
        ROWS,
        {"a": (6, 2), "b": (2, 8), "head": (8, 3)},
        {"a": "paired fc hidden", "b": "paired cf hidden", "head": OUTPUT},
    ),
    "bilinear": (
        bilinear,
        ROWS,
        {"w": (6, 6, 4), "head": (4, 2)},
        {"w": "contracted ccf hidden", "head": OUTPUT},
    ),
    "ensemble": (
        ensemble,
        ROWS,
        {"first": (3, 6, 4), "second": (3, 4, 2)},
        # All members see the same input, so that their kernels are one wide kernel.
        {"first": "contracted fcf hidden", "second": "contracted bcf output"},
    ),
    "mixer": (
        mixer,
        SEQUENCES,
        {"tokens": (5, 5), "channels": (6, 6), "head": (6, 2)},
        {"tokens": HIDDEN, "channels": HIDDEN, "head": OUTPUT},
    ),
    "gated": (
        gated,
        ROWS,
        {"gate": (6, 8), "value": (6, 8), "out": (8, 3)},
        {"gate": HIDDEN, "value": HIDDEN, "out": OUTPUT},
    ),
    "class_token": (
        class_token,
        SEQUENCES,
        {"token": (1, 1, 6), "body": (6, 8), "head": (8, 2)},
        {"token": "placed fff hidden", "body": HIDDEN, "head": OUTPUT},
    ),
    "joined_kernels": (
        joined_kernels,
        ROWS,
        {"q": (6, 4), "k": (6, 4), "v": (6, 4), "out": (4, 2)},
        {"q": HIDDEN, "k": HIDDEN, "v": HIDDEN, "out": OUTPUT},
    ),
}
for name, (fn, inputs, shapes, expected) in FUNCTIONS.items():
    MODELS[name] = both(fn, **shapes), inputs, [expected, expected]


def test_there_are_enough_architectures():
    assert len(MODELS) >= 14


@pytest.mark.parametrize("library", [0, 1], ids=["linen", "nnx"])
@pytest.mark.parametrize("name", MODELS)
def test_roles_of_an_architecture(name, library):
    makers, inputs, expected = MODELS[name]
    assert roles_of(makers[library](), inputs) == expected[library]


class EquinoxNetwork(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 4)
        self.embed = eqx.nn.Embedding(9, 8, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
        self.norm = eqx.nn.LayerNorm(8)
        self.cell = eqx.nn.GRUCell(8, 8, key=keys[2])
        self.head = eqx.nn.Linear(8, 9, key=keys[3])

    def __call__(self, ids):
        x = jax.vmap(self.embed)(ids)
        x = jax.vmap(self.norm)(x + self.attention(x, x, x))
        state, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(8), x)
        return self.head(state)


class EquinoxConvolutions(eqx.Module):
    first: eqx.nn.Conv2d
    grouped: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    depthwise: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 4)
        self.first = eqx.nn.Conv2d(4, 8, 3, key=keys[0])
        self.grouped = eqx.nn.Conv2d(8, 8, 3, groups=2, use_bias=False, key=keys[3])
        self.norm = eqx.nn.GroupNorm(2, 8)
        self.depthwise = eqx.nn.Conv2d(8, 8, 3, groups=8, use_bias=False, key=keys[1])
        self.up = eqx.nn.ConvTranspose2d(8, 4, 3, key=keys[2])

    def __call__(self, image):
        x = jax.nn.relu(self.first(jnp.moveaxis(image, -1, 0)))
        x = self.norm(self.grouped(x))
        return self.up(jax.nn.relu(self.depthwise(x)))


class EquinoxTied(eqx.Module):
    shared: eqx.nn.Shared
    cell: eqx.nn.LSTMCell

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        embed = eqx.nn.Embedding(9, 32, key=keys[0])
        head = eqx.nn.Linear(32, 9, use_bias=False, key=keys[1])
        self.shared = eqx.nn.Shared((embed, head), lambda p: p[1].weight, lambda p: p[0].weight)
        self.cell = eqx.nn.LSTMCell(32, 32, key=keys[2])

    def __call__(self, ids):
        embed, head = self.shared()
        state = jnp.zeros(32), jnp.zeros(32)
        step = lambda state, x: (self.cell(x, state), None)
        return head(jax.lax.scan(step, state, jax.vmap(embed)(ids))[0][0])


class EquinoxScanned(eqx.Module):
    layers: eqx.nn.Linear
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(6, 6, key=key))(keys)
        self.norm = eqx.nn.RMSNorm(6, use_bias=False)
        self.head = eqx.nn.Linear(6, 2, key=keys[0])

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, layer: (x + jnp.tanh(eqx.combine(layer, static)(x)), None)
        return self.head(self.norm(jax.lax.scan(step, x, arrays)[0]))


KERNEL, LAST = "contracted fc hidden", "contracted fc output"
EQUINOX = {
    "network": (
        EquinoxNetwork,
        TOKENS,
        {
            "embed/weight": "looked up cf hidden",
            **{f"attention/{name}_proj/weight": KERNEL for name in ("query", "key", "value")},
            "attention/output_proj/weight": KERNEL,
            "norm/weight": "multiplied f hidden",
            "norm/bias": BIAS,
            "cell/weight_ih": KERNEL,
            "cell/weight_hh": "contracted fc hidden recurrent",
            "cell/bias": BIAS,
            "cell/bias_n": BIAS,
            "head/weight": LAST,
            "head/bias": LAST_BIAS,
        },
    ),
    "convolutions": (
        EquinoxConvolutions,
        IMAGES,
        {
            "first/weight": "contracted fccc hidden",
            "first/bias": "added fff hidden",
            "grouped/weight": "contracted fccc hidden",
            "norm/weight": "multiplied f hidden",
            "norm/bias": BIAS,
            "depthwise/weight": "contracted bccc hidden",
            "up/weight": "contracted fccc output",
            "up/bias": "added fff output",
        },
    ),
    "tied_lstm": (
        EquinoxTied,
        TOKENS,
        {
            "shared/pytree/0/weight": "contracted fc output tied",
            "cell/weight_ih": KERNEL,
            "cell/weight_hh": "contracted fc hidden recurrent",
            "cell/bias": BIAS,
        },
    ),
    "scanned": (
        EquinoxScanned,
        ROWS,
        {
            "layers/weight": "contracted bfc hidden",
            "layers/bias": "added bf hidden",
            "norm/weight": "multiplied f hidden",
            "head/weight": LAST,
            "head/bias": LAST_BIAS,
        },
    ),
}


@pytest.mark.parametrize("name", EQUINOX)
def test_roles_in_equinox(name):
    make, inputs, expected = EQUINOX[name]
    assert roles_of(make(), inputs) == expected
