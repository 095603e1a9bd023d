import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.recipes import ema
from tekoa.testing import assert_trees_equal


def linear_loop(**options):
    """A loop whose weight decreases by 1 in every step: 4, 3, 2, 1."""
    data = [(np.ones((4, 1), np.float32), np.zeros(4, np.float32))] * 4
    model = tekoa.as_model_fns({"w": jnp.full(1, 4.0)}, lambda params, x: x @ params["w"])
    task = tekoa.TrainTask(
        optimizer=optax.sgd(1.0), loss=lambda out, y: jnp.mean(out - y), data=data
    )
    return tekoa.TrainLoop(model, task, n_steps=3, n_steps_per_checkpoint=1, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_average_equals_that_computed_by_hand(accumulate):
    """Weights 4 | 3, 2, 1 at decay 0.5: 4 -> 3.5 -> 2.75 -> 1.875."""
    loop = linear_loop(ema=0.5, accumulate=accumulate)
    weights = [(float(c.model_params["w"][0]), float(c.average["w"][0])) for c in loop]
    assert weights == [(3.0, 3.5), (2.0, 2.75), (1.0, 1.875)]


def test_the_average_equals_its_closed_form(model, toy):
    loop = toy.loop(model, optax.adam(0.05), n_steps=6, n_steps_per_checkpoint=1, ema=0.9)
    path = [loop.state.params, *(checkpoint.model_params for checkpoint in loop)]
    weights = [0.9**6, *(0.1 * 0.9 ** (6 - i) for i in range(1, 7))]
    expected = jax.tree.map(lambda *xs: sum(w * np.float64(x) for w, x in zip(weights, xs)), *path)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        loop.state.average,
        expected,
    )


def test_evaluation_and_best_checkpoint_use_the_average(tmp_path):
    loop = linear_loop(ema=0.5)
    data = [(np.ones((4, 1), np.float32), np.zeros(4, np.float32))]
    task = tekoa.EvalTask(metrics={"loss": lambda out, y: jnp.mean(out - y)}, data=data)
    evaluation = tekoa.EvalLoop(task, model=loop.model_fns)
    best = tekoa.LowestCheckpointFileWriter(tmp_path, metric="loss")
    process = tekoa.serial(evaluation, best)
    losses = [process(checkpoint).metrics["eval"]["loss"] for checkpoint in loop]
    best.close()
    assert losses == [3.5, 2.75, 1.875]
    (path,) = tmp_path.glob("*/checkpoint_3*")
    stored = tekoa.load_checkpoint(path)
    assert stored["average"]["w"].tolist() == [1.875]


def test_the_average_is_exported_as_plain_parameters(tmp_path, model, toy):
    """A model without an average can use the exported parameters."""
    loop = toy.loop(model, optax.adam(0.05), ema=0.5)
    list(loop)
    with tekoa.store.Store(tmp_path) as store:
        store.save(loop.step, {"model_params": loop.state.eval_params})
    exported = tekoa.load_checkpoint(tmp_path)["model_params"]
    assert_trees_equal(exported, jax.device_get(loop.state.average))
    x, _ = toy.data(1)[0]
    rng = jax.random.key(0)
    outputs, _ = loop.model_fns.apply(exported, {}, (x,), rng=rng, train=False)
    expected, _ = loop.model_fns.apply(loop.state.average, {}, (x,), rng=rng, train=False)
    np.testing.assert_array_equal(outputs, expected)


@pytest.mark.slow
def test_the_average_in_the_recipe_is_smoother(capsys):
    curves = ema.run(n_steps=400)
    for library in ("Linen", "NNX"):
        weights, average = (curves.lines[f"{library}, {kind}"] for kind in ("weights", "average"))
        assert np.std(np.diff(average[10:])) < np.std(np.diff(weights[10:])) / 2
    assert "layers to export: hidden, out" in capsys.readouterr().out
