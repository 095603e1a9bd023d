import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tekoa

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
Y = X @ np.float32([[1.0], [-2.0], [0.5]])
DATA = [{"x": X[i : i + 16], "y": Y[i : i + 16]} for i in (0, 16, 32, 48)] * 3


def plain():
    def init(rng, batch):
        params = {"w": jax.random.normal(rng, (3, 1)), "b": jnp.zeros(1)}
        return {"params": params, "opt": optax.adam(0.1).init(params)}

    def step(state, batch, rng):
        def loss(params):
            noise = 0.01 * jax.random.normal(rng, batch["y"].shape)
            return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"] - noise) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = optax.adam(0.1).update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return init, step


def with_nnx():
    def init(rng, batch):
        model = nnx.Sequential(
            nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)),
            nnx.Linear(8, 1, rngs=nnx.Rngs(2)),
        )  # fmt: skip
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(state, batch, rng):
        model, optimizer = state
        value, grads = nnx.value_and_grad(
            lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        )(model)
        optimizer.update(model, grads)
        return (model, optimizer), {"loss": value, "twice": 2 * value}

    return init, step


def with_equinox():
    tx = optax.adam(0.1)

    def init(rng, batch):
        model = eqx.nn.MLP(3, 1, 8, 1, key=rng)
        return model, tx.init(eqx.filter(model, eqx.is_array))

    def step(state, batch, rng):
        @eqx.filter_value_and_grad
        def loss(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        model, opt_state = state
        value, grads = loss(model)
        updates, opt_state = tx.update(grads, opt_state)
        return (eqx.apply_updates(model, updates), opt_state), {"loss": value}

    return init, step


def loop_of(functions, n_steps=12, model=None, **options):
    init, step = functions
    task = tekoa.TrainTask(step=step, init=init, data=DATA)
    return tekoa.TrainLoop(
        model, task, n_steps=n_steps, n_steps_per_checkpoint=4, rng=jax.random.key(3), **options
    )


def arrays(tree):
    data = [jax.random.key_data(x) if tekoa_key(x) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(x) for x in data if hasattr(x, "dtype")]


def tekoa_key(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_the_loop_runs_the_same_arithmetic_as_a_hand_written_one():
    init, step = plain()
    loop = loop_of((init, step))
    losses = [checkpoint.metrics["train"]["loss"] for checkpoint in loop]
    init_rng, rng = jax.random.split(jax.random.key(3))
    state, expected = init(init_rng, DATA[0]), []
    for i, batch in enumerate(DATA):
        state, value = jax.jit(step)(state, batch, jax.random.fold_in(rng, i))
        expected.append(float(value))
    assert losses == pytest.approx(np.reshape(expected, (3, 4)).mean(axis=1), rel=1e-5)
    np.testing.assert_allclose(loop.model["params"]["w"], state["params"]["w"], rtol=1e-5)
    assert int(loop.model["opt"][0].count) == 12


@pytest.mark.parametrize("library", [plain, with_nnx, with_equinox])
def test_a_resumed_run_has_the_same_bits(library, tmp_path):
    whole = loop_of(library())
    losses = [checkpoint.metrics["train"]["loss"] for checkpoint in whole]
    assert losses[-1] < losses[0]
    writer = tekoa.CheckpointFileWriter(tmp_path)
    for checkpoint in loop_of(library(), n_steps=4):
        writer(checkpoint)
    writer.close()
    resumed = loop_of(library(), model=tekoa.CheckpointFileReader(tmp_path, None))
    assert resumed.step == 4
    list(resumed)
    assert type(resumed.model) is type(whole.model)
    for a, b in zip(arrays(whole.model), arrays(resumed.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_metrics_are_means_by_name():
    checkpoint = next(loop_of(with_nnx()))
    train = checkpoint.metrics["train"]
    assert train["twice"] == pytest.approx(2 * train["loss"], rel=1e-6)


def test_nan_stops_with_the_last_good_state():
    init, step = plain()
    bad = [*DATA[:2], {**DATA[2], "y": DATA[2]["y"] * np.nan}, *DATA[3:]]
    task = tekoa.TrainTask(step=step, init=init, data=bad)
    loop = tekoa.TrainLoop(None, task, n_steps=12, n_steps_per_checkpoint=4)
    with pytest.raises(tekoa.NonFiniteError, match="At step 3 the loss was nan"):
        next(loop)
    assert loop.step == 2
    assert all(np.isfinite(x).all() for x in arrays(loop.model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda init, step: tekoa.TrainTask(step=step, data=DATA), "needs init="),
        (
            lambda init, step: tekoa.TrainTask(
                step=step, init=init, data=DATA, loss=lambda out: out
            ),
            "replaces apply, optimizer, loss",
        ),
        (lambda init, step: loop_of((init, step), accumulate=2), "accumulate= changes Tekoa's"),
        (lambda init, step: loop_of((init, lambda *args: 3)), "must return the new state and"),
        (lambda init, step: loop_of((init, lambda *args: ({}, 3.0))), "of the structure that init"),
        (lambda init, step: loop_of((lambda *args: 3, step)), "with floating point arrays"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(*plain())
