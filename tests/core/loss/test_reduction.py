import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.core.loss import reduction
from tekoa.core.loss.reduction import ReductionError
from tekoa.core.metrics import Mean
from tekoa.testing import count_compilations

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)
MASK = (np.arange(12) % 5 > 0).astype(np.float32)
CLASSES = np.arange(12) % 3
PARAMS = {"w": RNG.normal(size=(3, 3)).astype(np.float32)}
FNS = model_fns(PARAMS, lambda p, x: x @ p["w"])


def cross_entropy(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def masked_mean(out, batch):
    return jnp.sum(out.mean(1) ** 2 * batch["mask"]) / jnp.sum(batch["mask"])


def contrastive(out, batch):
    del batch
    similarity = out @ out.T
    labels = jnp.arange(out.shape[0])
    return optax.softmax_cross_entropy_with_integer_labels(similarity, labels).mean()


def by_label(reduce):
    return lambda out, batch: reduce(cross_entropy(out, batch["label"]))


LOSSES = {
    "mean of squares": lambda out, batch: jnp.mean(out**2),
    "sum of squares": lambda out, batch: jnp.sum(out**2),
    "mean of classes": by_label(jnp.mean),
    "sum of classes": by_label(jnp.sum),
    "sum over a fixed batch size": lambda out, batch: jnp.sum(out**2) / 12,
    "mean over ones": lambda out, batch: Mean(
        jnp.sum(out.mean(1) ** 2 * batch["mask"]), jnp.sum(batch["mask"])
    ),
    "total with a fixed count": lambda out, batch: Mean(jnp.sum(out**2), jnp.float32(6.0)),
    "logarithms": lambda out, batch: -jnp.mean(jax.nn.log_softmax(out)[:, 0]),
}


def run(loss, accumulate, fns=FNS, **options):
    """Returns loss and gradients of one step."""
    tx = optax.sgd(1.0)
    state = steps.init_state(fns, tx, jax.random.key(0), inputs=(X,))
    step = steps.make_train_step(
        fns,
        loss,
        tx,
        accumulate=accumulate,
        keep_grads=True,
        split=lambda batch: ((batch["x"],), (batch,)),
        **options,
    )
    _, output = jax.jit(step)(state, {"x": X, "mask": MASK, "label": CLASSES})
    return output


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("n_parts", [3, 12])
def test_the_result_of_the_parts_is_that_of_the_full_batch(loss, n_parts):
    whole, parts = run(loss, 1), run(loss, n_parts)
    assert float(parts.loss) == pytest.approx(float(whole.loss), rel=1e-5)
    np.testing.assert_allclose(parts.grads["w"], whole.grads["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        contrastive,
        masked_mean,
        lambda out, batch: jnp.max(jnp.abs(out)),
        lambda out, batch: jnp.exp(jnp.mean(out)),
        lambda out, batch: jnp.sum(out**2) / jnp.sqrt(out.shape[0]),
        lambda out, batch: Mean(contrastive(out, batch) * out.shape[0], out.shape[0]),
    ],
    ids=["contrastive", "mean over ones", "maximum", "exp of mean", "square root", "mean"],
)
def test_a_loss_that_parts_cannot_give_is_refused(loss):
    with pytest.raises(ReductionError, match=r"neither a mean nor a sum.*reduction='mean'"):
        run(loss, 3)
    run(loss, 1)


def test_outputs_that_have_met_other_rows_are_refused():
    fns = model_fns(PARAMS, lambda p, x: (x @ p["w"]) @ x.T)
    with pytest.raises(ReductionError, match=r"shape \(12, 12\) .* and \(4, 4\)"):
        run(lambda out, batch: jnp.mean(out), 3, fns=fns)


def test_an_output_without_rows_must_be_declared():
    fns = model_fns(PARAMS, lambda p, x: (x @ p["w"], jnp.sum((x @ p["w"]) ** 2)))

    def loss(out, penalty, batch):
        del batch
        return jnp.sum(out) + penalty

    with pytest.raises(ReductionError, match="reduction='mean'"):
        run(loss, 3, fns=fns)
    whole, parts = run(loss, 1, fns=fns), run(loss, 3, fns=fns, reduction="sum")
    np.testing.assert_allclose(parts.grads["w"], whole.grads["w"], rtol=1e-4)


def test_a_loss_that_the_model_returns_must_be_declared():
    fns = model_fns(PARAMS, lambda p, x: jnp.sum((x @ p["w"]) ** 2))
    with pytest.raises(ReductionError, match="the loss that the model returns"):
        run(None, 3, fns=fns)
    whole, parts = run(None, 1, fns=fns), run(None, 3, fns=fns, reduction="sum")
    assert float(parts.loss) == pytest.approx(float(whole.loss), rel=1e-5)
    fns = model_fns(PARAMS, lambda p, x: Mean(jnp.sum((x @ p["w"]) ** 2), x.shape[0]))
    assert float(run(None, 3, fns=fns).loss) == pytest.approx(float(whole.loss) / 12, rel=1e-5)


def test_a_loss_for_one_size_of_batch_is_reported():
    with pytest.raises(ReductionError, match="could not be evaluated on 4 and 2 rows"):
        run(lambda out, batch: jnp.mean(out.reshape(4, 3) ** 2), 3)


def test_metrics_that_are_sums_stay_sums():
    def loss(out, batch):
        values = cross_entropy(out, batch["label"])
        return jnp.mean(values), {"total": jnp.sum(values), "mean": jnp.mean(values)}

    expected = cross_entropy(X @ PARAMS["w"], CLASSES)
    tx, batch = optax.sgd(1.0), {"x": X, "mask": MASK, "label": CLASSES}
    names = ("total", "mean")
    state = steps.init_state(FNS, tx, jax.random.key(0), inputs=(X,), metric_names=names)
    split = lambda batch: ((batch["x"],), (batch,))
    step = steps.make_train_step(FNS, loss, tx, accumulate=3, split=split)
    state, _ = jax.jit(step)(state, batch)
    assert float(state.sums["total"].compute()) == pytest.approx(float(expected.sum()), rel=1e-5)
    assert float(state.sums["mean"].compute()) == pytest.approx(float(expected.mean()), rel=1e-5)


def test_the_loss_is_evaluated_once_for_all_programs():
    seen = []

    def loss(out, targets):
        seen.append(out.shape)
        return jnp.sum(out - targets)

    shapes = [jax.ShapeDtypeStruct((n, 3), jnp.float32) for n in (8, 4)]
    whole, part = ((shape, shape) for shape in shapes)
    assert reduction.find_reductions(loss, whole, part) == {"": "sum"}
    assert seen == [(4, 3), (2, 3), (2, 3)]
    with count_compilations() as compiled:
        reduction.find_reductions(loss, whole, part)
    assert (len(seen), compiled.total) == (3, 0)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction must be one of"):
        run(contrastive, 3, reduction="max")


def test_a_loss_may_be_an_object_that_has_no_hash():
    @dataclasses.dataclass
    class Loss:
        scale: float

        def __call__(self, out, batch):
            return self.scale * jnp.mean(out**2)

    parts, whole = (run(Loss(2.0), accumulate) for accumulate in (3, 1))
    assert float(parts.loss) == pytest.approx(float(whole.loss), rel=1e-6)
