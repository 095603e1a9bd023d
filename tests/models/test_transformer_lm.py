import logging
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tekoa
from tekoa.core import trees
from tekoa.estimator import DataFacts, UsageError
from tekoa.loop.task import TrainTask
from tekoa.loop.train import TrainLoop
from tekoa.models import transformer_lm

V, D, HEADS, MLP = 11, 16, 2, 24


def make_model(**changes):
    options = {"n_layers": 2, "width": D, "n_heads": HEADS, "mlp_width": MLP, **changes}
    return transformer_lm.TransformerLM(V, **options)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, V, (3, 9))


@pytest.fixture(scope="module")
def boxed(tokens):
    return jax.jit(make_model().init)(jax.random.key(0), tokens)


@pytest.fixture(scope="module")
def params(boxed):
    return nn.meta.unbox(boxed)


@pytest.fixture(scope="module")
def apply():
    return jax.jit(make_model().apply)


def numpy_logits(params, tokens):
    """Runs the decoder in numpy on one row, position by position."""
    p = {k: np.asarray(v, np.float64) for k, v in trees.flatten_named(params).items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean() + 1e-6) * p[name]

    def rotate(x, position):
        """Rotates each pair (x[i], x[i + half]) as a complex number."""
        half = len(x) // 2
        angles = position * 10_000.0 ** (-np.arange(half) / half)
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag])

    stream = [p["params/embedding"][t] * math.sqrt(D) for t in tokens]
    for i in range(2):
        at = f"params/attention_{i}/"
        normed = [norm(x, at + "norm/scale") for x in stream]
        for now in reversed(range(len(stream))):
            for head in range(HEADS):
                q = rotate(normed[now] @ p[at + "query"][:, head], now)
                keys = [rotate(normed[j] @ p[at + "key"][:, head], j) for j in range(now + 1)]
                values = [normed[j] @ p[at + "value"][:, head] for j in range(now + 1)]
                weights = np.exp([q @ k / math.sqrt(D / HEADS) for k in keys])
                mixed = (weights / weights.sum()) @ np.array(values)
                stream[now] = stream[now] + mixed @ p[at + "out"][head]
        at = f"params/mlp_{i}/"
        for now, x in enumerate(stream):
            n = norm(x, at + "norm/scale")
            into, gate = n @ p[at + "in"], n @ p[at + "gate"]
            stream[now] = x + (into / (1 + np.exp(-into)) * gate) @ p[at + "out"]
    return np.array([p["params/embedding"] @ norm(x, "params/norm/scale") for x in stream])


def test_logits_equal_numpy(params, apply, tokens):
    scattered = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
    )
    logits = apply(scattered, tokens)
    np.testing.assert_allclose(logits[1], numpy_logits(scattered, tokens[1]), rtol=1e-3, atol=1e-4)


def test_a_packed_document_is_predicted_as_if_alone(params, apply, tokens):
    batch = {
        "tokens": np.concatenate([tokens[0, :4], tokens[1, :3], [0, 0]])[None],
        "segments": np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]]),
        "positions": np.array([[0, 1, 2, 3, 0, 1, 2, 0, 1]]),
    }
    inputs, segments = transformer_lm.model_inputs(batch, start_id=7)
    packed = apply(params, inputs, segments)[0]
    alone = apply(params, transformer_lm.model_inputs({"tokens": tokens}, start_id=7))
    np.testing.assert_allclose(packed[:4], alone[0, :4], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[4:7], alone[1, :3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_token_affects_no_earlier_position(params, apply, tokens, at):
    changed = tokens.copy()
    changed[:, at] = (changed[:, at] + 1) % V
    before, after = apply(params, tokens), apply(params, changed)
    np.testing.assert_array_equal(before[:, :at], after[:, :at])
    assert (before[:, at] != after[:, at]).any()


def test_rotated_products_depend_only_on_the_distance():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def product(i, j):
        at = lambda x, position: transformer_lm.rotate(x, jnp.array([position])).ravel()
        return float(at(q, i) @ at(k, j))

    assert product(5, 2) == pytest.approx(product(3, 0), abs=1e-5)
    assert product(105, 102) == pytest.approx(product(3, 0), abs=1e-4)
    assert product(5, 2) != pytest.approx(product(2, 5), abs=1e-3)
    assert product(4, 4) == pytest.approx(float(q.ravel() @ k.ravel()), abs=1e-5)


def test_every_parameter_has_logical_axes(boxed):
    specs = trees.flatten_named(
        jax.tree.map(
            lambda box: "/".join(box.names),
            boxed["params"],
            is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned),
        )
    )
    assert specs == {
        "embedding": "vocab/embed",
        "norm/scale": "embed",
        **{
            f"{layer}_{i}/{name}": axes
            for i in range(2)
            for layer, name, axes in [
                ("attention", "norm/scale", "embed"),
                ("attention", "query", "embed/heads/kv"),
                ("attention", "key", "embed/heads/kv"),
                ("attention", "value", "embed/heads/kv"),
                ("attention", "out", "heads/kv/embed"),
                ("mlp", "norm/scale", "embed"),
                ("mlp", "in", "embed/mlp"),
                ("mlp", "gate", "embed/mlp"),
                ("mlp", "out", "mlp/embed"),
            ]
        },
    }


def test_axes_change_nothing_without_rules(params, tokens):
    text = str(jax.make_jaxpr(make_model().apply)(params, tokens))
    assert "sharding_constraint" not in text


def test_logits_are_the_same_on_a_mesh(boxed, params, apply, tokens):
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "model"),
        devices=jax.devices()[:4],
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
    rules = [("heads", "model"), ("mlp", "model"), ("vocab", None)]
    layout = tekoa.Layout(mesh=mesh, logical_axis_rules=rules)
    rows = np.concatenate([tokens, tokens[:1]])
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    placed = jax.device_put(params, shardings)

    def apply_with_layout(params, rows):
        with layout.active():
            return make_model().apply(params, rows)

    assert "sharding_constraint" in str(jax.make_jaxpr(apply_with_layout)(placed, rows))
    logits = jax.jit(apply_with_layout)(placed, rows)
    kernel = placed["params"]["mlp_0"]["in"]
    assert kernel.addressable_shards[0].data.shape == (D, MLP // 2)
    np.testing.assert_allclose(logits, apply(params, rows), rtol=1e-4, atol=1e-5)


def test_plain_mlp_has_no_gate(tokens):
    shapes = jax.eval_shape(make_model(is_gated=False).init, jax.random.key(0), tokens)
    names = trees.flatten_named(nn.meta.unbox(shapes))
    assert not [name for name in names if "gate" in name]


def small(**changes):
    config = transformer_lm.get_config()
    config.update(seq_length=16, n_layers=1, width=16, n_heads=2, **changes)
    return config


def open_sample(config, batch_size=8):
    source = transformer_lm.open_data(config, "sample://split=valid", train=True)
    sample = next(source.batches(batch_size))
    return source, DataFacts(
        info=source.info, n_examples=len(source), batch_size=batch_size, sample=sample
    )


def test_stochastic_depth_leaves_out_parts_of_blocks_by_row():
    sizes = {"n_layers": 1, "width": 8, "n_heads": 2, "mlp_width": 8}
    plain = transformer_lm.TransformerLM(7, **sizes)
    model = transformer_lm.TransformerLM(7, **sizes, stochastic_depth=0.5)
    tokens = np.tile(np.arange(5), (64, 1))
    params = plain.init(jax.random.key(0), tokens)
    np.testing.assert_array_equal(model.apply(params, tokens), plain.apply(params, tokens))
    rows = model.apply(params, tokens, train=True, rngs={"dropout": jax.random.key(1)})
    # Attention or not, and the MLP or not.
    assert len(np.unique(np.asarray(rows).round(4), axis=0)) == 4


def test_inputs_are_shifted_by_one_token():
    batch = {"tokens": np.array([[5, 6, 7], [8, 9, 1]])}
    inputs = transformer_lm.model_inputs(batch, start_id=3)
    assert inputs.tolist() == [[3, 5, 6], [3, 8, 9]]


@pytest.mark.slow
def test_training_with_found_scales_learns(caplog):
    caplog.set_level(logging.INFO, "tekoa")
    config = small()
    config.opt_config.update(optimizer="amos", beta=0.98, momentum=0.0)
    source, facts = open_sample(config)
    experiment = transformer_lm.experiment(config, facts)
    data = source.batches(8, shuffle=True)
    task = TrainTask(
        optimizer=experiment.make_optimizer(),
        loss=experiment.loss,
        data=data,
        split=experiment.split,
    )
    loop = TrainLoop(experiment.model, task, n_steps_per_checkpoint=25, steps_per_dispatch=1)
    assert "Amos scales found for the model" in caplog.text
    assert "NOT PLACED" not in caplog.text
    costs = [loop.next_checkpoint().metrics["train"]["cost"] for _ in range(2)]
    assert costs[1] < 0.8 * costs[0] < math.log(67)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 3}, "width must be a multiple of 2 . n_heads = 6, got 16"),
        ({"n_layers": 0}, "n_layers must be 1 or more, got 0"),
        ({"mlp": "swiglu"}, "mlp must be 'gated' or 'plain', got 'swiglu'"),
        ({"mlp_ratio": 0.0}, "mlp_ratio must be above 0, got 0.0"),
        ({"opt_config": {"learning_rate": 0.1}}, "auto sets its own rates"),
        ({"stochastic_depth": 1.0}, r"stochastic_depth must be in"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in"),
        ({"z_loss": -1.0}, "z_loss must be 0 or more, got -1.0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_invalid_settings_are_usage_errors(changes, message):
    config = small()
    _, facts = open_sample(config)
    config.update(changes)
    with pytest.raises(UsageError, match=message):
        transformer_lm.experiment(config, facts)
