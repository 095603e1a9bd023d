import types

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tekoa.core.guard import NonFiniteError
from tekoa.estimator import MeanMetrics, TrainState
from tekoa.estimator.long_train import OwnTraining
from tekoa.extensions import files
from tekoa.loop.train import TrainLoop
from tekoa.store import t5x
from tekoa.testing import assert_trees_equal, count_compilations

DATA = [np.random.default_rng(i).normal(size=(4, 2)).astype(np.float32) for i in range(12)]


class Model(nn.Module):
    """Its loss is the distance from the last batch's mean, which it remembers."""

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


def made(data=DATA, config=None, **functions):
    functions = {"get_train_state": get_train_state, "train_step": train_step, **functions}
    module = types.SimpleNamespace(**functions)
    return OwnTraining(module, config, config, data=data, rng=jax.random.key(0))


def loop(training=None, init=None, **options):
    options = {"n_steps": 12, "n_steps_per_checkpoint": 5, "grads": False, **options}
    return TrainLoop(init, training or made(), rnkey=jax.random.key(3), **options)


def by_hand(n_steps):
    """Places after each step, and the losses, in numpy."""
    place, last = np.ones(2), np.zeros(2)
    losses = []
    for x in DATA[:n_steps]:
        losses.append(((place - last) ** 2).sum())
        place, last = place - 0.2 * (place - last), x.mean(0)
    return place, losses


def test_the_files_step_is_run_on_the_engines_state():
    found = list(loop())
    place, losses = by_hand(12)
    assert [c.step for c in found] == [5, 10, 12]
    np.testing.assert_allclose(found[-1].state.params["place"], place, rtol=1e-5)
    periods = [losses[:5], losses[5:10], losses[10:]]
    for checkpoint, period in zip(found, periods):
        told = checkpoint.metrics["train"]
        assert told["train_loss"] == pytest.approx(np.mean(period), rel=1e-5)
        assert set(told) == {
            "train_loss", "gradients_l2norm", "weights_l2norm", "seconds_per_step"
        }  # fmt: skip
    # What training alone hands on is no part of the model.
    assert found[-1].state.variables == {}
    np.testing.assert_allclose(
        found[-1].state.carry["collections"]["memory"]["last"], DATA[11].mean(0), rtol=1e-6
    )


def test_it_compiles_once():
    running = loop(steps_per_dispatch=1)
    running.next_checkpoint()
    with count_compilations() as compiled:
        running.next_checkpoint()
    assert compiled.total == 0


def test_several_steps_at_once_are_the_same():
    one, many = (list(loop(steps_per_dispatch=n))[-1] for n in (1, 2))
    np.testing.assert_allclose(one.state.params["place"], many.state.params["place"], rtol=1e-6)


def test_a_resumed_run_has_the_bits_of_the_whole(tmp_path):
    whole = list(loop(steps_per_dispatch=1))[-1]
    writer = files.CheckpointFileWriter(tmp_path, keep=3)
    running = loop(steps_per_dispatch=1)
    running.next_checkpoint()
    running.next_step()
    writer(running.next_step())  # In the middle of a period: metrics are saved too.
    writer.close()
    again = loop(init=files.CheckpointFileReader(tmp_path, target=None), steps_per_dispatch=1)
    assert again.step == 7
    assert_trees_equal(list(again)[-1].state, whole.state)


@pytest.mark.parametrize("layout", ["t5x", "tekoa"])
def test_both_formats_hold_all_of_the_state(tmp_path, layout):
    running = loop()
    expected = running.next_checkpoint()
    writer = files.CheckpointFileWriter(tmp_path, layout=layout)
    writer(expected)
    writer.close()
    again = loop(init=files.CheckpointFileReader(tmp_path, target=None))
    assert_trees_equal(again.state, expected.state)


@pytest.mark.parametrize("save_mutable", [False, True])
def test_the_t5x_format_has_the_names_of_the_original(tmp_path, save_mutable):
    def get(config, rng):
        state, tx = get_train_state(config, rng), optax.adam(0.1)
        return state.replace(save_mutable=save_mutable, tx=tx, opt_state=tx.init(state.params))

    writer = files.CheckpointFileWriter(tmp_path, layout="t5x")
    writer(loop(made(get_train_state=get)).next_checkpoint())
    writer.close()
    tree = t5x.read_tree(tmp_path / "checkpoint_5")
    assert list(tree["target"]) == ["place"]
    assert int(tree["state"]["step"]) == 5
    assert set(tree["state"]["param_states"]["0"]) == {"count", "mu", "nu"}
    assert ("flax_mutables" in tree) == save_mutable
    if save_mutable:
        assert list(tree["flax_mutables"]["memory"]) == ["last"]


def test_a_number_that_is_not_finite_stops_at_the_last_good_state():
    data = [*DATA[:6], np.full((4, 2), np.nan, np.float32), *DATA[6:]]
    running = loop(made(data), steps_per_dispatch=1)
    running.next_checkpoint()
    with pytest.raises(NonFiniteError, match="At step 8 the loss was nan and the gradient"):
        running.next_checkpoint()
    assert running.step == 7
    assert np.isfinite(running.state.params["place"]).all()


def test_an_average_of_the_parameters_is_kept():
    found = list(loop(ema=0.5))[-1].state
    average = np.ones(2)
    for n in range(1, 13):
        average = 0.5 * average + 0.5 * by_hand(n)[0]
    np.testing.assert_allclose(found.average["place"], average, rtol=1e-5)


class WithExtra(TrainState):
    """A state with an array of its own."""

    n_seen: jax.Array = None


def test_arrays_of_a_derived_state_are_carried():
    def get(config, rng):
        state = get_train_state(config, rng)
        fields = {name: getattr(state, name) for name in state.__dataclass_fields__}
        return WithExtra(**fields, n_seen=jnp.zeros((), jnp.int32))

    def step(config, batch, state, metrics):
        new, metrics = train_step(config, batch, state, metrics)
        return new.replace(n_seen=state.n_seen + len(batch)), metrics

    found = list(loop(made(get_train_state=get, train_step=step)))[-1]
    assert int(found.state.carry["fields"]["n_seen"]) == 48


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda *args: train_step(*args)[0], r"must give \(state, metrics\)"),
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
def test_a_step_that_breaks_its_contract_is_told_so(step, said):
    with pytest.raises((TypeError, ValueError), match=said):
        loop(made(train_step=step)).next_step()


def test_what_is_no_train_state_is_refused():
    with pytest.raises(TypeError, match=r"must give a tekoa\.estimator\.TrainState"):
        made(get_train_state=lambda config, rng: {"params": 1})


def test_what_only_the_file_can_do_is_refused():
    with pytest.raises(ValueError, match="affair of train_step"):
        loop(accumulate=2)


def test_metrics_may_be_a_module_of_the_files_own():
    class Largest(nn.Module):
        @nn.compact
        def __call__(self, value=None):
            seen = self.variable("metrics", "seen", lambda: jnp.full((), -jnp.inf))
            if value is not None:
                seen.value = jnp.maximum(seen.value, value)
            return {"largest": seen.value}

    def get(config, rng):
        return get_train_state(config, rng).replace(metrics_mod=Largest())

    def step(config, batch, state, metrics):
        (_, variables), grads = state.value_and_grad_apply_fn()(state.params, batch)
        _, metrics = state.metrics_mod.apply(metrics, jnp.max(batch), mutable=["metrics"])
        return state.apply_gradients(grads=grads, _vars=variables), metrics

    found = list(loop(made(get_train_state=get, train_step=step)))
    expected = [max(x.max() for x in part) for part in (DATA[:5], DATA[5:10], DATA[10:])]
    assert [c.metrics["train"]["largest"] for c in found] == pytest.approx(expected)
