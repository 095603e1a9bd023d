import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.recipes import lbfgs

pytestmark = pytest.mark.slow


def rosenbrock_loop(tx, **options):
    """A loop whose model is the Rosenbrock function; its output is the loss."""

    def value(params, x):
        a, b = params["ab"][0], params["ab"][1]
        return (1 - a) ** 2 + 100 * (b - a**2) ** 2 + 0 * jnp.sum(x)

    model = tekoa.as_model_fns({"ab": jnp.array([-1.2, 1.0])}, value)
    data = [(np.zeros((4, 1), np.float32), ())] * 200
    task = tekoa.TrainTask(optimizer=tx, data=data)
    return tekoa.TrainLoop(model, task, n_steps_per_checkpoint=1, **options)


def test_rosenbrock_is_solved():
    loop = rosenbrock_loop(optax.lbfgs(), n_steps=80)
    assert min(float(checkpoint.loss) for checkpoint in loop) < 1e-10
    np.testing.assert_allclose(loop.state.params["ab"], 1.0, atol=1e-4)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.sgd(0.01), optax.scale_by_backtracking_linesearch(15)),
        optax.polyak_sgd(),
        optax.chain(optax.sgd(1e-4), optax.contrib.reduce_on_plateau(patience=2)),
    ],
    ids=["backtracking", "polyak", "plateau"],
)
def test_other_line_searches_get_their_arguments(tx):
    losses = [float(checkpoint.loss) for checkpoint in rosenbrock_loop(tx, n_steps=3)]
    assert losses[0] == pytest.approx(24.2)
    assert losses[-1] < losses[0]


def test_the_step_compiles_once(model, toy):
    loop = toy.loop(model, optax.lbfgs(), n_steps=9)
    loop.next_checkpoint(), loop.next_checkpoint()  # The second starts from a copy.
    with tekoa.testing.count_compilations() as compiled:
        loop.next_checkpoint()
    assert compiled.total == 0, compiled.names


def test_the_line_search_uses_one_dropout_mask_per_step():
    """Loss and gradient use the same random numbers; otherwise the search would fail."""

    def noisy(params, rng, x):
        return jnp.sum((params["w"] - jax.random.normal(rng, (3,))) ** 2) + 0 * jnp.sum(x)

    model = tekoa.as_model_fns({"w": jnp.zeros(3)}, noisy)
    data = [(np.zeros((2, 1), np.float32), ())] * 3
    task = tekoa.TrainTask(optimizer=optax.lbfgs(), data=data)
    loop = tekoa.TrainLoop(model, task, n_steps=3, n_steps_per_checkpoint=1)
    rng = loop.state.rng
    checkpoint = loop.next_step()
    drawn = jax.random.normal(jax.random.fold_in(rng, 0), (3,))
    # On a quadratic, the first search moves straight towards the minimum, which is the draw.
    ratio = checkpoint.model_params["w"] / drawn
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
    assert 0.1 < float(ratio[0]) < 1.9


@pytest.mark.slow
def test_lbfgs_is_better_than_adam_in_the_recipe():
    lines = lbfgs.run(n_steps=30).lines
    for library in ("Linen", "NNX"):
        assert lines[f"{library}, LBFGS"][-1] < lines[f"{library}, Adam"][-1] / 3
