import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tekoa.estimator.jestimator import modeling


def test_cross_entropy_equals_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    labels = rng.integers(5, size=(2, 3))
    mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logs, labels[..., None], -1)[..., 0]
    losses = modeling.sparse_xe_with_logits(labels, logits, reduce_all=False)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(
        modeling.sparse_xe_with_logits(labels, logs, mask, normalized=True),
        expected[mask].sum(),
        rtol=1e-5,
    )


def test_normalizing_a_loss_keeps_its_ratio():
    loss, size = modeling.normalize_loss_by_size(jnp.float32(18.0), 9)
    assert (float(loss), float(size)) == (6, 3)


def test_slices_along_any_axis():
    slices = modeling.unstack(jnp.arange(6).reshape(2, 3), -2)
    assert [x.tolist() for x in slices] == [[0, 1, 2], [3, 4, 5]]


def test_initial_values_are_within_two_deviations():
    values = modeling.truncated_normal_initializer(0.1)(jax.random.key(0), (1000,), jnp.float32)
    assert 0.05 < float(values.std()) < 0.1
    assert float(jnp.abs(values).max()) <= 0.2 + 1e-6


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return modeling.Dropout(0.5)(x)


class Outer(nn.Module):
    @nn.compact
    @modeling.global_kwargs(pass_down=True)
    def __call__(self, x):
        return Inner()(x)


def test_arguments_are_passed_down_the_call_stack():
    x = jnp.ones((100,))
    rngs = {"dropout": jax.random.key(0)}
    without = Outer().apply({}, x, rngs=rngs)
    dropped = Outer().apply({}, x, enable_dropout=True, rngs=rngs)
    assert (without == 1).all()
    assert set(np.unique(dropped)) == {0.0, 2.0}
    # Arguments passed down once do not affect the next call.
    assert (Outer().apply({}, x, rngs=rngs) == 1).all()


def test_unknown_arguments_are_rejected():
    with pytest.raises(TypeError, match="has no argument 'wrong'"):
        modeling.Dropout(0.5).apply({}, jnp.ones(3), wrong=True)
    with pytest.raises(TypeError, match="must have the parameters"):
        modeling.global_kwargs("missing")(lambda x: x)


class Scanned(nn.Module):
    """A scan that does not name the stream of its dropout, as in older models."""

    def setup(self):
        self.dropout = modeling.Dropout(0.5)

    @modeling.global_kwargs(pass_down=True)
    def __call__(self, xs):
        def body(self, carry, x):
            return carry, self.dropout(x)

        scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False})
        return scan(self, 0.0, xs)[1]


def test_dropout_in_a_scan_draws_another_mask_in_each_iteration():
    model, xs, scan = Scanned(), jnp.ones((4, 100)), nn.scan
    rngs = {"dropout": jax.random.key(0)}
    with modeling.dropout_in_scans():
        out = model.apply({}, xs, enable_dropout=True, rngs=rngs)
    assert nn.scan is scan
    assert set(np.unique(out)) == {0, 2}
    assert len({row.tobytes() for row in np.asarray(out)}) == 4


@pytest.mark.parametrize("reshape_kernel", [True, False])
def test_dense_layers_over_several_axes_equal_numpy(reshape_kernel):
    layer = modeling.DenseGeneral(
        (4, 5),
        use_bias=True,
        axis=(-2, -1),
        bias_init=nn.initializers.normal(),
        kernel_axis_names=("a", "b", "c", "d"),
        reshape_kernel=reshape_kernel,
    )
    x = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
    variables = layer.init(jax.random.key(0), x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    assert kernel.shape == ((6, 20) if reshape_kernel else (2, 3, 4, 5))
    names = variables["params_axes"]["kernel_axes"].names
    assert names == (("a * b", "c * d") if reshape_kernel else ("a", "b", "c", "d"))
    expected = x.reshape(6, 6) @ np.reshape(kernel, (6, 20)) + bias
    np.testing.assert_allclose(layer.apply(variables, x), expected.reshape(6, 4, 5), rtol=2e-5)
