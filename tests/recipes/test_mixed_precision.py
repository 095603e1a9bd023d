import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.models import mnist
from tekoa.recipes import mixed_precision


def test_parameters_slots_and_averages_stay_float32(model, toy):
    loop = toy.loop(model, optax.adam(0.05), precision="bf16", ema=0.9, accumulate=2, grads=True)
    checkpoint = loop.next_checkpoint()
    state = checkpoint.model_params, checkpoint.average, checkpoint.optimizer_state
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves((state, checkpoint.grads))}
    assert dtypes == {"float32", "int32"}


def test_the_model_runs_in_bfloat16_and_nothing_in_float64(toy):
    fns = tekoa.as_model_fns(toy.models["nnx"]())
    tx = optax.adam(0.05)
    x, y = toy.data(1)[0]
    state = tekoa.init_state(fns, tx, jax.random.key(0), inputs=(x,))
    step = tekoa.make_train_step(fns, toy.loss, tx, precision="bf16")
    eqns = list(equations(jax.make_jaxpr(step)(state, (x, y))))
    products = [eqn.outvars[0].aval for eqn in eqns if "dot_general" in str(eqn.primitive)]
    # Products that are matrices belong to the model; norms are scalar products.
    dtypes = [aval.dtype.name for aval in products if aval.ndim == 2]
    # Two layers: two products forwards, three backwards.
    assert dtypes == ["bfloat16"] * 5
    assert not any(var.aval.dtype == "float64" for eqn in eqns for var in eqn.outvars)


def equations(jaxpr):
    """Yields all equations, including nested ones."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.slow
def test_the_cnn_reaches_the_loss_of_float32_after_an_epoch():
    source = tekoa.data.load("digits://split=train")
    losses = {}
    for precision in ("float32", "bf16"):
        task = tekoa.TrainTask(
            optimizer=optax.adam(1e-3),
            loss=mnist.loss,
            data=source.batches(32, seed=0, shuffle=2048, epochs=1),
            split=lambda batch: ((batch["image"],), (batch,)),
        )
        loop = tekoa.TrainLoop(
            mnist.CNN(10, (0.0, 16.0)), task, n_steps_per_checkpoint=10**6, precision=precision
        )
        (last,) = loop
        assert last.step == len(source) // 32
        evaluation = tekoa.EvalLoop(
            tekoa.EvalTask(
                metrics={"loss": lambda *args: mnist.loss(*args)[1]["loss"]},
                data=[next(source.batches(len(source), epochs=1))],
                split=task.split,
            ),
            model=loop.model_fns,
        )
        losses[precision] = evaluation(last).metrics["eval"]["loss"]
    np.testing.assert_allclose(losses["bf16"], losses["float32"], rtol=0.01)


@pytest.mark.slow
def test_the_recipe_reaches_the_loss_of_float32():
    lines = mixed_precision.run(n_steps=100).lines
    for library in ("Linen", "NNX"):
        np.testing.assert_allclose(
            lines[f"{library}, bf16"], lines[f"{library}, float32"], rtol=0.02
        )
