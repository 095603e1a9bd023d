import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import partitioning

from tekoa.bridges import any_model
from tekoa.core import step as steps
from tekoa.estimator import InferState, MeanMetrics, TrainState

X, Y = np.ones((4, 3), np.float32), np.arange(4, dtype=np.float32)


class Line(nn.Module):
    """A linear model, optionally with a mutable count of its calls."""

    counts: bool = False

    @nn.compact
    def __call__(self, x):
        if self.counts:
            count = self.variable("calls", "n", jnp.zeros, ())
            count.value = count.value + 1
        return nn.Dense(1)(x)[:, 0]

    def loss(self, x, y):
        return jnp.mean((self(x) - y) ** 2)

    def loss_and_rows(self, x, y):
        return self.loss(x, y), len(x)

    def loss_and_more(self, x, y):
        return self.loss(x, y), len(x), "more"


def create(model=None, tx=None, **options):
    metrics = MeanMetrics.create("loss")
    tx = tx or optax.sgd(0.1)
    return TrainState.create(metrics, tx, model or Line(), jax.random.key(0), X, **options)


def test_parameters_equal_those_of_the_short_form():
    fns = any_model.as_model_fns(Line())
    short = steps.init_state(fns, optax.sgd(0.1), jax.random.key(0), inputs=(X,))
    long = create()
    jax.tree.map(np.testing.assert_array_equal, long.params, short.params)
    np.testing.assert_array_equal(
        jax.random.key_data(long._state_rng), jax.random.key_data(short.rng)
    )


@pytest.mark.parametrize(
    ("counts", "method", "aux"),
    [
        (False, Line.loss, None),
        (False, Line.loss_and_rows, lambda rest: rest == 4),
        (False, Line.loss_and_more, lambda rest: rest == (4, "more")),
        (True, Line.loss, lambda rest: float(rest["calls"]["n"]) == 2),
        (True, Line.loss_and_rows, lambda rest: rest[0] == 4 and float(rest[1]["calls"]["n"]) == 2),
    ],
)
def test_auxiliary_values_are_as_in_jestimator(counts, method, aux):
    state = create(Line(counts))
    has_aux = method is not Line.loss
    value, grads = state.value_and_grad_apply_fn(has_aux)(state.params, X, Y, method=method)
    kernel, bias = state.params["Dense_0"]["kernel"], state.params["Dense_0"]["bias"]
    errors = X @ np.asarray(kernel)[:, 0] + np.asarray(bias) - Y
    loss = value if aux is None else value[0]
    assert float(loss) == pytest.approx(np.mean(errors**2), rel=1e-6)
    np.testing.assert_allclose(grads["Dense_0"]["bias"], [2 * errors.mean()], rtol=1e-5)
    assert aux is None or aux(value[1])


def test_has_aux_needs_a_tuple():
    state = create()
    with pytest.raises(TypeError, match="needs a model that returns a tuple"):
        state.value_and_grad_apply_fn(True)(state.params, X, Y, method=Line.loss)


def test_gradients_are_applied_and_other_fields_replaced():
    state = create(Line(counts=True))
    grads = jax.tree.map(jnp.ones_like, state.params)
    new = state.apply_gradients(grads=grads, _vars={"calls": {"n": jnp.ones(())}})
    assert int(new.step) == 1
    np.testing.assert_allclose(
        new.params["Dense_0"]["bias"], state.params["Dense_0"]["bias"] - 0.1, rtol=1e-6
    )
    assert new.mutable() == ["calls"]
    assert set(new.variables()) == {"params", "calls"}
    assert new.variables({"other": 1})["params"] == {"other": 1}


def test_each_step_has_its_own_key_which_a_restart_reproduces():
    state = create()
    later = state.replace(step=state.step + 1)
    keys = [jax.random.key_data(s.step_rng()) for s in (state, later, create())]
    assert (keys[0] != keys[1]).any()
    np.testing.assert_array_equal(keys[0], keys[2])


class Named(nn.Module):
    """Names its axes in both ways that Flax offers."""

    @nn.compact
    def __call__(self, x):
        boxed = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
        x = x @ self.param("boxed", boxed, (3, 2))
        beside = partitioning.param_with_axes(
            "beside", nn.initializers.ones, (2,), jnp.float32, axes=("mlp",)
        )
        return x + beside


def test_logical_axes_are_reported_and_not_left_in_the_variables():
    state = create(Named())
    assert state.logical_axes() == {
        ("params", "boxed"): ("embed", "mlp"),
        ("params", "beside"): ("mlp",),
    }
    assert state.mutable() == []
    assert state.params["boxed"].shape == (3, 2)


def test_an_infer_state_holds_results():
    state = InferState.create(Line(counts=True), X)
    assert state.ret is None
    outputs, changed = state.apply_fn(state.variables(), X, mutable=state.mutable())
    state = state.replace(ret=outputs, _vars=changed)
    assert state.ret.shape == (4,)
    assert float(state._vars["calls"]["n"]) == 2
