import json
import shutil
import types

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa import auto_for, store
from tekoa.core.nonfinite import NonFiniteError
from tekoa.estimator import MeanMetrics, TrainState, UsageError
from tekoa.estimator.cli import main
from tekoa.estimator.jestimator.train import OwnTraining
from tekoa.extensions import checkpoint_files
from tekoa.loop.train import TrainLoop
from tekoa.models import linear_regression
from tekoa.store.formats.t5x import tree as t5x
from tekoa.testing import assert_trees_equal, count_compilations

DATA = [np.random.default_rng(i).normal(size=(4, 2)).astype(np.float32) for i in range(12)]


class Model(nn.Module):
    """Its loss is the distance from the mean of the previous batch, which it remembers."""

    @nn.compact
    def __call__(self, x):
        last = self.variable("memory", "last", jnp.zeros, (2,))
        place = self.param("place", nn.initializers.ones, (2,))
        loss = jnp.sum((place - last.value) ** 2)
        last.value = x.mean(0)
        return loss


def get_train_state(config, rng):
    metrics = MeanMetrics.create("train_loss", "never")
    return TrainState.create(metrics, optax.sgd(0.1), Model(), rng, jnp.zeros((4, 2)))


def train_step(config, batch, state, metrics):
    (loss, variables), grads = state.value_and_grad_apply_fn()(state.params, batch)
    _, metrics = state.metrics_mod.apply(
        metrics, "train_loss", loss, method=MeanMetrics.update, mutable=["metrics"]
    )
    return state.apply_gradients(grads=grads, _vars=flax.core.freeze(variables)), metrics


def make_training(data=DATA, config=None, **functions):
    functions = {"get_train_state": get_train_state, "train_step": train_step, **functions}
    module = types.SimpleNamespace(**functions)
    return OwnTraining(module, config, config, data=data)


def loop(training=None, init=None, **options):
    options = {"n_steps": 12, "n_steps_per_checkpoint": 5, "grads": False, **options}
    return TrainLoop(init, training or make_training(), rng=jax.random.key(3), **options)


def by_hand(n_steps):
    """The parameter after `n_steps`, and the losses, in numpy."""
    place, last = np.ones(2), np.zeros(2)
    losses = []
    for x in DATA[:n_steps]:
        losses.append(((place - last) ** 2).sum())
        place, last = place - 0.2 * (place - last), x.mean(0)
    return place, losses


def test_the_step_of_the_file_runs_on_the_state_of_the_engine():
    checkpoints = list(loop())
    place, losses = by_hand(12)
    assert [c.step for c in checkpoints] == [5, 10, 12]
    last = checkpoints[-1].state
    np.testing.assert_allclose(last.params["place"], place, rtol=1e-5)
    periods = [losses[:5], losses[5:10], losses[10:]]
    for checkpoint, period in zip(checkpoints, periods):
        metrics = checkpoint.metrics["train"]
        assert metrics["train_loss"] == pytest.approx(np.mean(period), rel=1e-5)
        assert set(metrics) == {
            "train_loss", "gradients_l2norm", "weights_l2norm", "seconds_per_step"
        }  # fmt: skip
    # Collections used in training only are not part of the model.
    assert last.variables == {}
    np.testing.assert_allclose(
        last.carry["collections"]["memory"]["last"], DATA[11].mean(0), rtol=1e-6
    )


def test_the_step_compiles_once():
    running = loop(steps_per_dispatch=1)
    running.next_checkpoint()
    with count_compilations() as compiled:
        running.next_checkpoint()
    assert compiled.total == 0


def test_several_steps_per_dispatch_give_the_same_result():
    one, many = (list(loop(steps_per_dispatch=n))[-1] for n in (1, 2))
    np.testing.assert_allclose(one.state.params["place"], many.state.params["place"], rtol=1e-6)


def test_a_resumed_run_is_bit_for_bit_the_same(tmp_path):
    uninterrupted = list(loop(steps_per_dispatch=1))[-1]
    writer = checkpoint_files.CheckpointFileWriter(tmp_path, keep=3)
    running = loop(steps_per_dispatch=1)
    running.next_checkpoint()
    running.next_step()
    writer(running.next_step())  # In the middle of a period, so metrics must be saved too.
    writer.close()
    resumed = loop(
        init=checkpoint_files.CheckpointFileReader(tmp_path, target=None), steps_per_dispatch=1
    )
    assert resumed.step == 7
    assert_trees_equal(list(resumed)[-1].state, uninterrupted.state)


@pytest.mark.parametrize("format", ["t5x", "native"])
def test_both_formats_store_the_complete_state(tmp_path, format):
    running = loop()
    expected = running.next_checkpoint()
    writer = checkpoint_files.CheckpointFileWriter(tmp_path, format=format)
    writer(expected)
    writer.close()
    resumed = loop(init=checkpoint_files.CheckpointFileReader(tmp_path, target=None))
    assert_trees_equal(resumed.state, expected.state)


@pytest.mark.parametrize("save_mutable", [False, True])
def test_the_t5x_format_uses_the_names_of_jestimator(tmp_path, save_mutable):
    def get(config, rng):
        state, tx = get_train_state(config, rng), optax.adam(0.1)
        return state.replace(save_mutable=save_mutable, tx=tx, opt_state=tx.init(state.params))

    writer = checkpoint_files.CheckpointFileWriter(tmp_path, format="t5x")
    writer(loop(make_training(get_train_state=get)).next_checkpoint())
    writer.close()
    tree = t5x.read_tree(tmp_path / "checkpoint_5")
    assert list(tree["target"]) == ["place"]
    assert int(tree["state"]["step"]) == 5
    assert set(tree["state"]["param_states"]["0"]) == {"count", "mu", "nu"}
    assert ("flax_mutables" in tree) == save_mutable
    if save_mutable:
        assert list(tree["flax_mutables"]["memory"]) == ["last"]


def test_nan_stops_at_the_last_finite_state():
    data = [*DATA[:6], np.full((4, 2), np.nan, np.float32), *DATA[6:]]
    running = loop(make_training(data), steps_per_dispatch=1)
    running.next_checkpoint()
    with pytest.raises(NonFiniteError, match="At step 8 the loss was nan and the gradient"):
        running.next_checkpoint()
    assert running.step == 7
    assert np.isfinite(running.state.params["place"]).all()


def test_the_average_of_the_parameters_is_updated():
    state = list(loop(ema=0.5))[-1].state
    average = np.ones(2)
    for n in range(1, 13):
        average = 0.5 * average + 0.5 * by_hand(n)[0]
    np.testing.assert_allclose(state.average["place"], average, rtol=1e-5)


class WithExtra(TrainState):
    """A state with an additional array."""

    n_seen: jax.Array = None


def test_arrays_of_a_derived_state_are_carried_between_steps():
    def get(config, rng):
        state = get_train_state(config, rng)
        fields = {name: getattr(state, name) for name in state.__dataclass_fields__}
        return WithExtra(**fields, n_seen=jnp.zeros((), jnp.int32))

    def step(config, batch, state, metrics):
        new, metrics = train_step(config, batch, state, metrics)
        return new.replace(n_seen=state.n_seen + len(batch)), metrics

    last = list(loop(make_training(get_train_state=get, train_step=step)))[-1]
    assert int(last.state.carry["fields"]["n_seen"]) == 48


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda *args: train_step(*args)[0], r"must return \(state, metrics\)"),
        (
            lambda c, b, s, m: (s.replace(_vars={"new": {}}), m),
            r"collections \['new'\], which the model's init did not",
        ),
        (
            lambda c, b, s, m: (s.replace(params={"place": jnp.ones(3)}), m),
            "'params/place' changed its shape",
        ),
    ],
)
def test_a_step_that_breaks_its_contract_is_reported(step, said):
    with pytest.raises((TypeError, ValueError), match=said):
        loop(make_training(train_step=step)).next_step()


def test_get_train_state_must_return_a_train_state():
    with pytest.raises(TypeError, match=r"must return a tekoa\.estimator\.TrainState"):
        make_training(get_train_state=lambda config, rng: {"params": 1})


class Line(nn.Module):
    """Its loss is a sum over rows, and it returns their number."""

    @nn.compact
    def __call__(self, x):
        errors = jnp.square(nn.Dense(1)(x) - x.sum(-1, keepdims=True))
        return errors.sum(), jnp.float32(x.shape[0])


def line(optimizer, step=None):
    """The training of `Line` with a metric of its mean loss."""

    def get(config, rng):
        metrics = MeanMetrics.create("train_loss")
        return TrainState.create(metrics, optimizer, Line(), rng, jnp.zeros((4, 2)))

    def train_line(config, batch, state, metrics):
        (loss, n_rows), grads = state.value_and_grad_apply_fn(has_aux=True)(state.params, batch)
        _, metrics = state.metrics_mod.apply(
            metrics, "train_loss", loss, n_rows, method=MeanMetrics.update, mutable=["metrics"]
        )
        return state.apply_gradients(grads=grads), metrics

    return make_training(get_train_state=get, train_step=step or train_line)


def test_accumulation_gives_the_result_of_the_full_batch():
    whole, parts = (loop(line(optax.sgd(0.01)), accumulate=n).next_checkpoint() for n in (1, 4))
    for a, b in zip(*map(jax.tree.leaves, (whole.state.params, parts.state.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    losses = [checkpoint.metrics["train"]["train_loss"] for checkpoint in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_lower_precision_changes_the_result_a_little():
    exact, low = (
        loop(line(optax.sgd(0.01)), precision=p).next_checkpoint() for p in ("float32", "bf16")
    )
    losses = [checkpoint.metrics["train"]["train_loss"] for checkpoint in (exact, low)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_a_line_search_has_what_it_needs():
    same = [DATA[0]] * 12
    training = line(optax.lbfgs())
    training.data = same
    checkpoint = loop(training, n_steps=10, n_steps_per_checkpoint=10).next_checkpoint()
    loss, _ = Line().apply({"params": checkpoint.state.params}, DATA[0])
    assert float(loss) < 1e-6


@pytest.mark.parametrize("option", [{"accumulate": 2}, {"precision": "bf16"}])
def test_a_step_with_its_own_gradients_cannot_accumulate(option):
    def step(config, batch, state, metrics):
        grads = jax.grad(lambda p: state.apply_fn({"params": p}, batch)[0])(state.params)
        return state.apply_gradients(grads=grads), metrics

    with pytest.raises(UsageError, match=r"by state\.value_and_grad_apply_fn"):
        loop(line(optax.sgd(0.01), step), **option).next_step()


def test_metrics_may_be_a_custom_module():
    class Largest(nn.Module):
        @nn.compact
        def __call__(self, value=None):
            largest = self.variable("metrics", "largest", lambda: jnp.full((), -jnp.inf))
            if value is not None:
                largest.value = jnp.maximum(largest.value, value)
            return {"largest": largest.value}

    def get(config, rng):
        return get_train_state(config, rng).replace(metrics_mod=Largest())

    def step(config, batch, state, metrics):
        (_, variables), grads = state.value_and_grad_apply_fn()(state.params, batch)
        _, metrics = state.metrics_mod.apply(metrics, jnp.max(batch), mutable=["metrics"])
        return state.apply_gradients(grads=grads, _vars=variables), metrics

    checkpoints = list(loop(make_training(get_train_state=get, train_step=step)))
    periods = (DATA[:5], DATA[5:10], DATA[10:])
    expected = [max(x.max() for x in period) for period in periods]
    assert [c.metrics["train"]["largest"] for c in checkpoints] == pytest.approx(expected)


def train_regression(directory, *flags, model="linear_regression"):
    """Trains on all rows at once, so that the order of the data does not matter."""
    steps = ["--train_batch_size=20", "--max_train_steps=2", "--noprogress", "--random_seed=1"]
    return main.main(["train", model, f"--model_dir={directory}", *steps, *flags])


def regression_rows():
    config = linear_regression.load_config(
        types.SimpleNamespace(module_config=linear_regression.get_config())
    )
    return next(config.train_data_fn(["dummy://"]).batches(20, epochs=1))


def regression_by_hand(optimizer, *, trained=("kernel", "bias")):
    """Two steps on the same rows, from zero, with optax alone."""
    rows = regression_rows()
    fixed = {"kernel": jnp.zeros((10, 5)), "bias": jnp.zeros(5)}

    def value_fn(params):
        params = {**fixed, **params}
        return jnp.mean((rows["x"] @ params["kernel"] + params["bias"] - rows["y"]) ** 2)

    params = {name: fixed[name] for name in trained}
    state, tx = optimizer.init(params), optax.with_extra_args_support(optimizer)
    for _ in range(2):
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
        params = optax.apply_updates(params, updates)
    return {**fixed, **params}


@pytest.mark.parametrize(
    ("flags", "optimizer", "trained"),
    [
        (["--optimizer=lbfgs"], optax.lbfgs(), ("kernel", "bias")),
        (
            ["--optimizer=adam", "--learning_rate=0.3", "--param_groups=bias=freeze"],
            optax.adam(0.3),
            ("kernel",),
        ),
    ],
)
def test_flags_replace_the_optimizer_of_the_file(tmp_path, flags, optimizer, trained):
    assert train_regression(tmp_path, *flags) == 0
    params = store.load(tmp_path)["model_params"]["linear"]
    expected = regression_by_hand(optimizer, trained=trained)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-4, atol=1e-6)


def test_auto_is_chosen_from_the_loss_of_the_step(tmp_path, capfd):
    assert train_regression(tmp_path, "--optimizer=auto") == 0
    assert "Optimizer auto (sphere): planned for 2 steps" in "".join(capfd.readouterr())
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert start["optimizer"]["name"] == "auto"

    def loss(params, x, y):
        return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)

    rows, zeros = regression_rows(), {"kernel": jnp.zeros((10, 5)), "bias": jnp.zeros(5)}
    optimizer = auto_for(loss, zeros, rows["x"], rows["y"], n_steps=2)
    params = store.load(tmp_path)["model_params"]["linear"]
    for name, value in regression_by_hand(optimizer).items():
        np.testing.assert_allclose(params[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_auto_resumes_with_the_same_scales(tmp_path):
    assert train_regression(tmp_path / "whole", "--optimizer=auto", "--max_train_steps=4") == 0
    half = ["--optimizer=auto", "--max_train_steps=4", "--check_every_steps=2"]
    assert train_regression(tmp_path / "half", *half, "--save_every_steps=2") == 0
    shutil.copytree(tmp_path / "half/save/checkpoint_2", tmp_path / "resumed/checkpoint_2")
    assert train_regression(tmp_path / "resumed", "--optimizer=auto", "--max_train_steps=4") == 0
    whole, resumed = (store.load(tmp_path / name) for name in ("whole", "resumed"))
    for item in ("model_params", "optimizer_state"):
        assert_trees_equal(resumed[item], whole[item])


OWN_GRADIENTS = """
import jax
from tekoa.models.linear_regression import *

def train_step(config, batch, state, metrics):
    def loss(params):
        rows = batch["x"], batch["y"]
        return state.apply_fn(state.variables(params), *rows, method=LinearRegression.mse)[0]
    return state.apply_gradients(grads=jax.grad(loss)(state.params)), metrics
"""


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--optimizer=auto", "Scales are found from the loss that train_step passes to"),
        ("--optimizer=lbfgs", "The optimizer needs the loss"),
        ("--lora_rank=9", "--lora_rank: rank=9 is too large"),
        ("--lora_where=kernel", "--lora_where needs --lora_rank=N."),
        ("--param_groups=embed=freeze", "--param_groups: No parameter is in group 'embed'"),
    ],
)
def test_flags_that_cannot_apply_are_refused(tmp_path, capsys, flag, message):
    model = tmp_path / "own_gradients.py"
    model.write_text(OWN_GRADIENTS)
    assert train_regression(tmp_path / "run", flag, model=str(model)) == 2
    assert message in capsys.readouterr().err


class Regression(nn.Module):
    """A decayed dense layer, with dropout and a running mean."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("average", "mean", jnp.zeros, ())
        mean.value = 0.9 * mean.value + 0.1 * x.mean()
        y = nn.Dense(3)(nn.Dropout(0.1, deterministic=False)(x))
        return jnp.mean((y - 1) ** 2), len(x)


def regression_state(optimizer):
    def get(config, rng):
        metrics = MeanMetrics.create("train_loss")
        return TrainState.create(metrics, optimizer, Regression(), rng, jnp.zeros((4, 100)))

    return get


def regression_step(config, batch, state, metrics):
    grad_fn = state.value_and_grad_apply_fn(has_aux=True)
    (_, (n_rows, variables)), grads = grad_fn(state.params, batch)
    assert n_rows == 8
    decayed = jax.tree.map(lambda g, p: g + 0.1 * p, grads, state.params)
    return state.apply_gradients(grads=decayed, _vars=flax.core.freeze(variables)), metrics


@pytest.mark.parametrize("optimizer", [optax.adamw(0.1), optax.lbfgs()], ids=["adamw", "lbfgs"])
def test_scales_are_those_of_the_loss_alone(optimizer):
    training = make_training(
        get_train_state=regression_state(optimizer), train_step=regression_step
    )
    batch = 2 * np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
    table = training.scales(batch)
    rows = {"/".join(row.name): row for row in table.rows}
    # 100 terms of rms 2; dropout hardly changes it.
    assert rows["Dense_0/kernel"].eta == pytest.approx(1 / 20, rel=0.1)
    assert rows["Dense_0/kernel"].slot_shape == (1, 3)
    assert rows["Dense_0/bias"].eta == pytest.approx(0.5)


def test_scales_need_the_loss():
    def own_gradients(config, batch, state, metrics):
        return state.apply_gradients(grads=state.params), metrics

    with pytest.raises(UsageError, match=r"value_and_grad_apply_fn\(\), which this train_step"):
        make_training(train_step=own_gradients).scales(DATA[0])
