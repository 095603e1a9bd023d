import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tekoa
from tekoa.core import trees
from tekoa.recipes import accumulation

pytestmark = pytest.mark.slow


def test_accumulation_equals_the_full_batch(model, toy):
    full = toy.loop(model, optax.adam(0.05))
    parts = toy.loop(model, optax.adam(0.05), accumulate=4)
    for a, b in zip(full, parts, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-5)
        assert a.step == b.step
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        full.state.params,
        parts.state.params,
    )


def temporary_bytes(n_rows, accumulate):
    """Returns the temporary memory of a step with a wide hidden layer, and the parameters' size."""
    params = {"a": jnp.zeros((16, 1024)), "b": jnp.zeros((1024, 1))}
    apply = lambda params, x: jnp.tanh(jnp.tanh(x @ params["a"])) @ params["b"]
    fns, tx = tekoa.as_model_fns(params, apply), optax.sgd(0.1)
    batch = np.zeros((n_rows, 16), np.float32), np.zeros((n_rows, 1), np.float32)
    state = tekoa.init_state(fns, tx, jax.random.key(0), inputs=(batch[0],))
    loss = lambda out, y: jnp.mean((out - y) ** 2)
    step = tekoa.make_train_step(fns, loss, tx, accumulate=accumulate)
    memory = jax.jit(step).lower(state, batch).compile().memory_analysis()
    return memory.temp_size_in_bytes, trees.n_bytes(params)


def test_memory_equals_that_of_one_part():
    full, n_bytes_of_params = temporary_bytes(4096, 1)
    parts, _ = temporary_bytes(4096, 16)
    one_part, _ = temporary_bytes(4096 // 16, 1)
    # Plus the sum of gradients, and the batch split into parts.
    assert parts < one_part + 3 * n_bytes_of_params + 4096 * 17 * 4
    assert parts < full / 8


@pytest.mark.slow
def test_the_recipe_reaches_the_same_loss_in_less_memory(capsys):
    curves = accumulation.run(n_steps=3)
    for megabytes in curves.lines.values():
        assert megabytes[-1] < megabytes[0] / 2
    for line in capsys.readouterr().out.splitlines():
        if "with full batches" in line:
            words = line.replace(",", "").split()
            assert float(words[2]) == pytest.approx(float(words[6]), rel=1e-5)
