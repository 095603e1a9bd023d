import logging
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.bridges import functions, scales
from tekoa.core.metrics import Mean
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.model_file import optimizers
from tekoa.optim import groups, named, rates
from tekoa.optim.amos import transform
from tekoa.optim.scales.auto import scales_of_function

PARAMS = {"dense": {"kernel": np.full((4, 3), 0.5, np.float32), "bias": np.zeros(3, np.float32)}}
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)


def model(params, x):
    return x @ params["dense"]["kernel"] + params["dense"]["bias"]


def value_fn(params):
    return jnp.mean(jnp.square(model(params, X) - Y))


def config(optimizer, **settings):
    return types.SimpleNamespace(optimizer=optimizer, **settings)


def make(optimizer, n_batches=100, more=(), **settings):
    return optimizers.make_optimizer(
        config(optimizer, **settings), n_batches=n_batches, **dict(more)
    )


def trained(tx, n_steps=5):
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(n_steps):
        params, state = step(params, state)
    return params


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


SETTINGS = {"learning_rate": 0.05, "momentum": 0.8, "beta": 0.95, "weight_decay": 0.02}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adam", lambda: optax.adam(0.05, b1=0.8, b2=0.95)),
        ("adamw", lambda: optax.adamw(0.05, b1=0.8, b2=0.95, weight_decay=0.02)),
        ("sgd", lambda: optax.sgd(0.05, momentum=0.8)),
        ("rmsprop", lambda: optax.rmsprop(0.05, decay=0.95, momentum=0.8)),
        ("lion", lambda: optax.lion(0.05, b1=0.8, b2=0.95, weight_decay=0.02)),
        ("adafactor", lambda: optax.adafactor(0.05, momentum=0.8)),
    ],
)
def test_settings_are_passed_under_the_names_of_optax(name, expected):
    assert_same(trained(make(name, **SETTINGS)), trained(expected()))


def test_lbfgs_ignores_the_rate():
    tx = make("lbfgs", learning_rate=1e-9)
    assert jax.tree.structure(tx.init(PARAMS)) == jax.tree.structure(optax.lbfgs().init(PARAMS))
    assert value_fn(trained(tx)) < 0.5 * value_fn(PARAMS)


def rates_of(tx):
    return {name: float(rate) for name, rate in rates.current_rates(tx.init(PARAMS)).items()}


def test_groups_have_separate_rates_that_can_be_read():
    tx = make("sgd", learning_rate=0.5, groups="kernel$ = 0.25 ; ^nothing=freeze")
    with pytest.warns(groups.UnusedRuleWarning, match="nothing"):
        assert rates_of(tx) == {"kernel$": 0.25, "^nothing": 0.0, ".*": 0.5}
    frozen = trained(make("adam", learning_rate=0.5, groups="bias$=freeze"))
    assert not frozen["dense"]["bias"].any()
    amos_rates = rates_of(make("amos", groups="bias$=0.5", more={"eta": {".*": 1.0}}))
    assert amos_rates == {"bias$": 0.5, ".*": pytest.approx(0.1)}


@pytest.mark.parametrize("text", ["bias", "=0.1", "bias=", "bias=-1", "bias=inf", "bi(as=0.1"])
def test_malformed_groups_are_rejected(text):
    with pytest.raises(UsageError, match="groups must be 'PATTERN=RATE"):
        make("adam", groups=text)
    with pytest.raises(UsageError, match="lbfgs has no rates"):
        make("lbfgs", groups="bias=0.1")


def test_zero_momentum_needs_no_slot():
    assert jax.tree.leaves(make("sgd", learning_rate=0.1, momentum=0.0).init(PARAMS)) == []
    tx = make("amos", momentum=0.0, more={"eta": {".*": 1.0}})
    assert isinstance(tx.init(PARAMS), transform.ScaleByAmosState)


@pytest.mark.parametrize(("name", "rate"), [("adam", 5e-4), ("sgd", 0.1)])
def test_the_default_rate_is_used_without_a_setting(name, rate):
    assert_same(trained(make(name)), trained(getattr(optax, name)(rate)))


def test_amos_uses_manual_scales():
    tables = {"eta": {".*bias": 0.5, ".*": "1 / SHAPE[0]"}, "slot_shape": {".*": ()}}
    tx = make("amos", more={**tables, "clip_value": 0.2}, **SETTINGS)
    expected = transform.amos(
        0.05,
        lambda name, shape: 0.5 if name[-1] == "bias" else 0.25,
        lambda name, shape: (),
        beta=0.95,
        momentum=0.8,
        clip_value=0.2,
    )
    assert_same(trained(tx), trained(expected))


def find_scales():
    return scales.find_scales(
        functions.model_fns(lambda rng, x: PARAMS, model),
        lambda out, y: Mean(jnp.sum(jnp.square(out - y)), out.size),
        (X, Y),
        split=lambda batch: ((batch[0],), (batch[1],)),
    )


def test_amos_finds_missing_scales_and_logs_them(caplog):
    caplog.set_level(logging.INFO, "tekoa")
    tx = make("amos", n_batches=400, beta=0.95, more={"find_scales": find_scales})
    # 1 / (rms of the input * sqrt(4 terms)); a bias beside unit outputs: 0.5.
    eta = 1 / (math.sqrt((X * X).mean()) * 2)
    expected = transform.amos(
        1 / 20,
        lambda name, shape: 0.5 if name[-1] == "bias" else eta,
        lambda name, shape: () if name[-1] == "bias" else (1, 3),
        beta=0.95,
    )
    params, expected_params = trained(tx), trained(expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), params, expected_params)
    assert "dense/kernel  (4, 3)" in caplog.text
    assert "learning rate 0.05; 1/sqrt(400 batches) is 0.05" in caplog.text


def test_scales_are_found_only_if_needed():
    def find():
        raise AssertionError("not needed")

    make("adam", learning_rate=0.1, more={"find_scales": find})
    make("amos", learning_rate=0.1, more={"find_scales": find, "eta": {".*": 1.0}})


def test_a_rate_too_small_for_amos_is_a_warning(caplog):
    make("amos", learning_rate=5e-4, more={"eta": {".*": 1.0}})
    assert "learning rate 0.0005 is small for Amos" in caplog.text
    assert "opt_config.learning_rate=None" in caplog.text


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("adm", {}, "no optimizer 'adm'. Did you mean 'adam'.*lbfgs"),
        ("softmax_cross_entropy", {}, "no optimizer"),
        ("scale_by_adam", {}, "no optimizer"),
        (None, {}, "no optimizer 'None'"),
        ("adam", {"learning_rate": 0.0}, "opt_config.learning_rate must be above 0, got 0.0"),
        ("adam", {"learning_rate": -1.0}, "learning_rate must be above 0"),
        ("adam", {"learning_rate": math.nan}, "learning_rate must be above 0, got nan"),
        ("adam", {"beta": 1.0}, r"opt_config.beta must be in \[0, 1\), got 1.0"),
        ("sgd", {"momentum": 1.5}, r"momentum must be in \[0, 1\)"),
        ("adamw", {"weight_decay": -0.1}, "weight_decay must be in"),
        ("adam", {"beta": "high"}, "beta must be in .*got 'high'"),
        ("amos", {}, "Amos needs scales"),
    ],
)
def test_mistakes_raise_usage_errors(name, settings, words):
    with pytest.raises(UsageError, match=words):
        make(name, **settings)


def test_amos_needs_the_number_of_batches():
    with pytest.raises(UsageError, match="number of batches in the data, got 0"):
        make("amos", n_batches=0, more={"eta": {".*": 1.0}})


@pytest.mark.parametrize("name", ["auto", "sphere", "muon"])
def test_optimizers_without_settings_are_left_to_the_loop(name):
    optimizer = make(name, **SETTINGS)
    assert isinstance(optimizer, named.NamedOptimizer)
    assert optimizer.name == name
    with pytest.raises(UsageError, match="has no rates to set"):
        make(name, groups="bias$=0.1")


def requested(own=None, **flags):
    return optimizers.requested_optimizer(RunConfig(**flags), lambda: own or optax.adam(0.1))


def test_flags_set_the_rate_and_the_groups_of_a_named_optimizer():
    sgd = requested(optimizer="sgd", learning_rate=0.3)
    assert sgd.resolve(lambda: None, n_steps=3) == "Optimizer sgd: learning rate 0.3."
    assert sgd.facts == {"name": "sgd", "learning_rate": 0.3}
    assert_same(trained(sgd), trained(optax.sgd(0.3)))
    tx = requested(optimizer="sgd", learning_rate=0.3, param_groups="bias$=0.01; kernel=freeze")
    result = trained(tx)
    assert_same(result["dense"]["kernel"], PARAMS["dense"]["kernel"])
    by_hand = {"bias": optax.sgd(0.01), "kernel": optax.set_to_zero()}
    labels = {"dense": {"kernel": "kernel", "bias": "bias"}}
    assert_same(result, trained(optax.partition(by_hand, labels)))


def test_flags_freeze_parameters_of_the_own_optimizer_and_of_lbfgs():
    own = optax.adam(0.1)
    assert requested(own) is own
    for tx in (
        requested(own, param_groups="bias=freeze"),
        requested(optimizer="lbfgs", param_groups="bias=freeze"),
    ):
        result = trained(tx)
        assert_same(result["dense"]["bias"], PARAMS["dense"]["bias"])
        assert value_fn(result) < value_fn(PARAMS)


def test_flags_freeze_parameters_beside_an_optimizer_without_settings():
    tx = groups.by_name(requested(optimizer="auto", param_groups="bias=freeze"))
    assert tx is not None
    x = np.ones((4, PARAMS["dense"]["kernel"].shape[0]), np.float32)
    table = scales_of_function(
        lambda p, x: x @ p["dense"]["kernel"] + p["dense"]["bias"], PARAMS, x
    )
    tx.resolve(lambda: table, n_steps=10)
    result = trained(tx)
    assert_same(result["dense"]["bias"], PARAMS["dense"]["bias"])
    assert not np.array_equal(result["dense"]["kernel"], PARAMS["dense"]["kernel"])


def test_groups_without_a_default_rate_train_the_rest():
    for tx in (
        requested(optimizer="adafactor", param_groups="bias=freeze"),
        make("adafactor", groups="bias=freeze"),
    ):
        result = trained(tx)
        assert not np.array_equal(result["dense"]["kernel"], PARAMS["dense"]["kernel"])
        assert_same(result["dense"]["bias"], PARAMS["dense"]["bias"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"learning_rate": 0.1}, "--learning_rate: the model sets the rates"),
        ({"param_groups": "bias=0.1"}, "--param_groups: the model sets the rates"),
        ({"optimizer": "lbfgs", "learning_rate": 0.1}, "--learning_rate: a line search"),
        ({"optimizer": "auto", "learning_rate": 0.1}, "--learning_rate: auto sets its own"),
        ({"optimizer": "auto", "param_groups": "bias=0.1"}, "--param_groups: auto sets its own"),
        ({"optimizer": "sgd", "learning_rate": 0.0}, "--learning_rate must be above 0"),
        ({"optimizer": "sgd", "param_groups": "bias"}, "--param_groups must be 'PATTERN=RATE"),
        ({"optimizer": "sgdd"}, "--optimizer: There is no optimizer 'sgdd'"),
    ],
)
def test_flags_that_cannot_apply_are_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        requested(**flags)


def test_a_group_without_parameters_is_refused():
    tx = requested(param_groups="bias=freeze; embed=freeze")
    with pytest.raises(UsageError, match=r"--param_groups.*'embed'.*dense/bias, dense/kernel"):
        tx.init(PARAMS)
