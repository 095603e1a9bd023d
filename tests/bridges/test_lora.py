import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
from tekoa.bridges import any_model
from tekoa.bridges.lora import lora
from tekoa.core import step as steps
from tekoa.core import trees
from tekoa.models import mnist
from tekoa.testing import assert_trees_equal

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(16, name="body")(x)))


class NnxModel(nnx.Module):
    def __init__(self):
        self.body = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(16, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x)))


class EquinoxModel(eqx.Module):
    body: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.body = eqx.nn.Linear(8, 16, key=keys[0])
        self.head = eqx.nn.Linear(16, 3, key=keys[1])

    def __call__(self, x):
        return self.head(jax.nn.relu(self.body(x)))


def haiku_model():
    def forward(x):
        return hk.Linear(3, name="head")(jax.nn.relu(hk.Linear(16, name="body")(x)))

    return hk.transform(forward)


def plain_model():
    rng = np.random.default_rng(1)
    params = {
        "body": [rng.normal(size=(8, 16)).astype(np.float32) / 3, np.zeros(16, np.float32)],
        "head": [rng.normal(size=(16, 3)).astype(np.float32) / 4, np.zeros(3, np.float32)],
    }

    def apply(params, x):
        (w0, b0), (w1, b1) = params["body"], params["head"]
        return jax.nn.relu(x @ w0 + b0) @ w1 + b1

    return any_model.as_model_fns(params, apply)


MODELS = {
    "linen": LinenModel,
    "nnx": NnxModel,
    "equinox": EquinoxModel,
    "haiku": haiku_model,
    "plain": plain_model,
}


def outputs(fns, params, variables, x=X):
    return fns.apply(params, variables, (x,), rng=jax.random.key(0), train=False)[0]


def test_new_adapters_do_not_change_the_outputs():
    fns = lora(NnxModel(), rank=2)
    np.testing.assert_array_equal(outputs(fns, *fns.init(jax.random.key(5), (X,))), NnxModel()(X))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_base_is_unchanged_and_merged_weights_give_the_same_outputs(make, train):
    model = make()
    fns = lora(model, rank=2, alpha=3.0)
    start, variables = fns.init(jax.random.split(jax.random.key(0))[0], (X,))
    state, losses = train(fns, 100)
    assert losses[-5] < 0.8 * losses[0]
    assert_trees_equal(state.variables["frozen"], variables["frozen"])
    names = trees.flatten_named(state.params)
    assert {name.rsplit("/", 1)[-1] for name in names} == {"lora_a", "lora_b"}
    assert trees.n_elements(state.params) == 2 * (8 + 16) + 2 * (16 + 3)
    assert all(
        not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (start, state.params)))
    )
    # Adam: two slots per adapter and a count.
    assert trees.n_elements(state.opt_state) == 2 * trees.n_elements(state.params) + 1
    merged = fns.merge(state.params, state.variables)
    plain = any_model.as_model_fns(model)
    if plain.merge is None:
        merged_outputs = outputs(plain, merged, {})
    else:
        merged_outputs = jax.vmap(merged)(X) if isinstance(merged, eqx.Module) else merged(X)
        assert type(merged) is type(model)
    adapted_outputs = outputs(fns, state.params, state.variables)
    np.testing.assert_allclose(merged_outputs, adapted_outputs, atol=1e-6)


class Layers(nnx.Module):
    """One of each kind of layer that has a matrix."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(10, 8, rngs=rngs)
        self.conv = nnx.Conv(8, 6, (3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.general = nnx.LinearGeneral((5, 6), (2, 3), axis=(-2, -1), rngs=rngs)
        self.einsum = nnx.Einsum("bij,ijk->bk", (2, 3, 4), (4,), rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, tokens):
        x = self.attention(self.conv(self.embed(tokens)))
        return self.norm(self.einsum(self.general(x)))


@pytest.mark.slow
def test_every_kind_of_nnx_layer_is_adapted():
    tokens = np.arange(20).reshape(4, 5) % 10
    layers = Layers()
    fns = lora(layers, rank=2)
    tx = optax.adam(1e-2)
    state = steps.init_state(fns, tx, jax.random.key(0), inputs=(tokens,))
    adapted = {name.rsplit("/", 1)[0] for name in trees.flatten_named(state.params)}
    weights = nnx.to_pure_dict(nnx.state(layers, nnx.Param))
    assert adapted == {k for k, v in trees.flatten_named(weights).items() if v.ndim > 1}
    # A query has axes (width, heads, head width), the output (heads, head width, width).
    attention = state.params["attention"]
    assert attention["query"]["kernel"]["lora_a"].shape == (6, 2)
    assert attention["out"]["kernel"]["lora_b"].shape == (2, 6)
    step = jax.jit(steps.make_train_step(fns, lambda out: jnp.mean(out**4), tx, split=_inputs_only))
    for _ in range(3):
        state, _ = step(state, tokens)
    merged = fns.merge(state.params, state.variables)
    # Without jit, every operation would be compiled separately.
    plain, before = jax.jit(lambda x: (merged(x), layers(x)))(tokens)
    assert np.abs(plain - before).max() > 1e-3
    adapted = jax.jit(lambda *args: fns.apply(*args, (tokens,), rng=state.rng, train=False)[0])(
        state.params, state.variables
    )
    np.testing.assert_allclose(plain, adapted, atol=1e-6)


def _inputs_only(batch):
    return (batch,), ()


def test_table_selects_what_is_adapted_trained_and_frozen(train):
    fns = lora(NnxModel(), where={"^head/": "train", "kernel$": "adapt"})
    state, _ = train(fns, 3)
    names = set(trees.flatten_named(state.params))
    assert names == {"body/kernel/lora_a", "body/kernel/lora_b", "head/bias", "head/kernel"}
    assert set(trees.flatten_named(state.variables["frozen"])) == {"body/bias", "body/kernel"}
    merged = fns.merge(state.params, state.variables)
    np.testing.assert_array_equal(merged.head.kernel[...], state.params["head"]["kernel"])
    np.testing.assert_array_equal(merged.body.bias[...], NnxModel().body.bias[...])


def test_adapters_can_be_saved_and_loaded_separately(tmp_path, train):
    fns = lora(NnxModel())
    state, _ = train(fns, 5)
    with tekoa.store.Store(tmp_path) as store:
        store.save(5, {"model_params": state.params})
    adapters = tekoa.load_checkpoint(tmp_path)["model_params"]
    again = lora(NnxModel(), adapters=adapters)
    params, variables = again.init(jax.random.key(9), (X,))
    assert_trees_equal(params, state.params)
    np.testing.assert_array_equal(
        outputs(again, params, variables), outputs(fns, state.params, state.variables)
    )


def test_base_is_matched_by_name_and_checked():
    trained = LinenModel().init(jax.random.key(3), X)["params"]
    fns = lora(LinenModel(), base=jax.tree.map(np.asarray, trained))
    _, variables = fns.init(jax.random.key(0), (X,))
    assert_trees_equal(variables["frozen"], trained)
    wrong = {**trained, "head": {"kernel": np.ones((16, 4)), "bias": trained["head"]["bias"]}}
    with pytest.raises(
        ValueError, match=r"'head/kernel' has shape \(16, 4\) in `base`, but \(16, 3\)"
    ):
        lora(LinenModel(), base=wrong).init(jax.random.key(0), (X,))
    with pytest.raises(ValueError, match="`base` and the model differ in: head/bias"):
        lora(LinenModel(), base={"body": trained["body"]}).init(jax.random.key(0), (X,))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_adapted_models_compute_in_16_bits_and_train_in_float32(train, precision, dtype):
    dtypes_in_call = []

    def apply(params, x):
        dtypes_in_call.append({params["w"].dtype, params["b"].dtype, x.dtype})
        return x @ params["w"] + params["b"]

    model = any_model.as_model_fns({"w": jnp.ones((8, 3)), "b": jnp.zeros(3)}, apply)
    state, losses = train(lora(model, rank=1), 8, precision=precision)
    assert {jnp.dtype(dtype)} in dtypes_in_call
    assert losses[-1] < losses[0]
    dtypes = {x.dtype.name for x in jax.tree.leaves((state.params, state.variables["frozen"]))}
    assert dtypes == {"float32"}


def test_a_bfloat16_base_has_float32_adapters():
    base = {"w": jnp.ones((8, 3), jnp.bfloat16)}
    fns = lora(any_model.as_model_fns(base, lambda p, x: x @ p["w"]), rank=1)
    params, variables = fns.init(jax.random.key(0), (X,))
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    assert fns.merge(params, variables)["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 4}, r"rank=4 is too large for parameter 'head/kernel' of shape \(16, 3\)"),
        ({"where": "kernal$"}, r"'kernal\$' of `where` matches no parameter.*body/kernel"),
        ({"where": "bias$"}, r"'body/bias' of shape \(16,\) has fewer than two axes"),
        ({"where": {"kernel": "freeze"}}, "nothing to adapt"),
        ({"adapters": {"body": {}}}, "`adapters` and the model differ in: body/kernel/lora_a"),
    ],
)
def test_errors_at_init_name_the_parameter(options, message):
    with pytest.raises(ValueError, match=message):
        lora(NnxModel(), **options).init(jax.random.key(0), (X,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a positive integer, got 0"),
        ({"rank": 1.5}, "rank must be"),
        ({"alpha": 0}, "alpha must be positive"),
        ({"where": {"kernel": True}}, r"where\['kernel'\] must be one of"),
        ({"where": "kernel("}, r"'kernel\(' is not a regular expression"),
    ],
)
def test_invalid_arguments_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        lora(NnxModel(), **options)


def test_adapting_a_model_twice_is_refused():
    with pytest.raises(ValueError, match="adapted twice"):
        lora(lora(NnxModel())).init(jax.random.key(0), (X,))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_the_base_is_sharded_like_the_model():
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    model = lora(nn.Dense(16, kernel_init=init), rank=1)
    layout = tekoa.Layout(
        mesh=tekoa.make_mesh(data=2, model=4), logical_axis_rules=[("mlp", "model")]
    )
    task = tekoa.TrainTask(
        optimizer=optax.adam(0.1),
        loss=lambda out, y: jnp.mean((out - y) ** 2),
        data=[(X, np.zeros((16, 16), np.float32))] * 2,
    )
    loop = tekoa.TrainLoop(model, task, n_steps=2, layout=layout, grads=False)
    (checkpoint,) = loop
    kernel = checkpoint.model_state["frozen"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (8, 4)
    assert checkpoint.model_params["kernel"]["lora_a"].sharding.is_fully_replicated


def test_outputs_do_not_depend_on_the_number_of_rows():
    """A compiler may fuse A @ B with the layer's own product, whose size decides how."""
    rng = np.random.default_rng(0)
    x = rng.random((96, 8, 8, 1), np.float32)
    model = mnist.CNN(10, (0.0, 1.0))
    fns = lora(model, rank=2)
    params, variables = fns.init(jax.random.key(0), (x,))
    params = jax.tree.map(lambda leaf: np.float32(0.1 * rng.normal(size=leaf.shape)), params)

    @jax.jit
    def outputs(params, variables, x):
        return fns.apply(params, variables, (x,), rng=jax.random.key(1), train=False)[0]

    expected = model.apply({"params": fns.merge(params, variables)}, x)
    for n_rows in (8, 96):
        actual = outputs(params, variables, x[:n_rows])
        np.testing.assert_allclose(actual, expected[:n_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_adapters_have_scales_at_which_they_are_as_large_as_their_weight(alpha):
    params = {"w": jnp.zeros((100, 400)), "v": jnp.zeros((400, 5)), "b": jnp.zeros(5)}
    fns = any_model.as_model_fns(params, lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"] + p["b"])
    batch = jax.random.normal(jax.random.key(0), (64, 100)), jnp.zeros((64, 5))
    mse = lambda y, target: jnp.mean((y - target) ** 2)
    where = {"w": "adapt", "v": "train"}
    model = lora(fns, 3, where=where, alpha=alpha)
    table = tekoa.find_scales(model, mse, batch)
    trained = model.init(jax.random.key(0), (batch[0],))[0]
    assert [row.name for row in table] == trees.leaf_names(trained)
    assert [row.shape for row in table] == [leaf.shape for leaf in jax.tree.leaves(trained)]

    drawn = {
        row.name: row.eta * jax.random.normal(jax.random.key(i), row.shape)
        for i, row in enumerate(table)
    }
    scale = 1.0 if alpha is None else alpha / 3
    change = scale * drawn["w", "lora_a"] @ drawn["w", "lora_b"]
    # 100 terms of rms 1.
    np.testing.assert_allclose(np.sqrt(np.mean(change**2)), 0.1, rtol=0.3)
    assert table["v"].eta == tekoa.find_scales(fns, mse, batch)["v"].eta
    assert {table["w/lora_a"].role.kind, table["w/lora_b"].role.kind} == {"paired"}
