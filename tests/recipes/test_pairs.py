"""The recipes are options of one step: they work alone, in difficult pairs, and all together."""

import jax
import numpy as np
import optax
import pytest

import tekoa

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

SWITCHES = ("ema", "lora", "lbfgs", "rates", "accumulation", "sharded_slots")
PAIRS = [("lbfgs", "rates"), ("lora", "sharded_slots"), ("lbfgs", "accumulation")]
COMBINATIONS = [*((switch,) for switch in SWITCHES), *PAIRS, SWITCHES]
QUICK = {("lora", "sharded_slots")}


def make_optimizer(chosen):
    """Returns LBFGS, Adam with rates by group, or both: LBFGS as one of the groups."""
    search = optax.lbfgs(memory_size=3)
    adam = optax.adam(0.03)
    if "rates" not in chosen:
        return search if "lbfgs" in chosen else adam
    first = search if "lbfgs" in chosen else 0.05
    return tekoa.param_groups({"out": first, ".*": 0.01}, make=optax.adam)


def make_loop(model, toy, chosen, reader=lambda model: model):
    options = {"grads": False}
    if "lora" in chosen:
        model = tekoa.lora(model, rank=2)
    if "ema" in chosen:
        options["ema"] = 0.9
    if "accumulation" in chosen:
        options["accumulate"] = 2
    if "sharded_slots" in chosen:
        options |= {"devices": jax.devices()[:8], "optimizer_rules": "data"}
    return toy.loop(reader(model), make_optimizer(chosen), n_steps=9, **options)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(chosen, id="+".join(chosen), marks=() if chosen in QUICK else pytest.mark.slow)
        for chosen in COMBINATIONS
    ],
)
def test_recipes_train_together_compile_once_and_resume(chosen, model, toy):
    loop = make_loop(model, toy, chosen)
    losses = [float(loop.next_checkpoint().loss), float(loop.next_checkpoint().loss)]
    with tekoa.testing.count_compilations() as compiled:
        losses.append(float(loop.next_checkpoint().loss))
    assert compiled.total == 0, compiled.names
    assert np.isfinite(losses).all()
    x, y = toy.data()[0]
    start = make_loop(model, toy, chosen).model
    assert loss_of(model, loop.model, x, y) < loss_of(model, start, x, y)
    tekoa.testing.check_resume(
        lambda reader: make_loop(model, toy, chosen, reader), at=3, n_kills=0
    )


def loss_of(model, trained, x, y):
    """Returns the loss of a `TrainLoop.model`: a module, or a tree of plain weights."""
    out = trained(x) if callable(trained) else model.apply({"params": trained}, x)
    return float(np.mean((np.asarray(out) - y) ** 2))


def test_adapter_slots_are_sharded_and_rates_reported(model, toy):
    loop = make_loop(model, toy, ("lora", "rates", "sharded_slots"))
    rates = loop.next_checkpoint().metrics["rates"]
    assert rates == {"out": pytest.approx(0.05), ".*": pytest.approx(0.01)}
    inner = loop.state.opt_state.inner_states["out"].inner_state.inner[0]
    a = inner.mu["out"]["kernel"]["lora_a"]
    assert a.shape == (8, 2)
    assert a.addressable_shards[0].data.shape == (1, 2)
