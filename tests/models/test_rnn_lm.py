import jax
import numpy as np
import pytest

from tekoa.models import RNNLM

TOKENS = np.random.default_rng(0).integers(0, 7, (3, 10))


def test_every_token_has_logits_and_every_layer_a_carry():
    model = RNNLM(vocab_size=7, d_model=4, n_layers=2)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    logits, variables = model.init_with_output(keys, TOKENS)
    assert logits.shape == (3, 10, 7)
    assert sorted(variables["carry"]) == ["layer_0", "layer_1"]


def test_two_halves_equal_the_complete_sequence():
    model = RNNLM(vocab_size=7, d_model=4, deterministic=True)
    variables = model.init(jax.random.key(0), TOKENS)
    complete, _ = model.apply(variables, TOKENS, mutable=["carry"])
    first, changed = model.apply(variables, TOKENS[:, :5], mutable=["carry"])
    second, _ = model.apply({**variables, **changed}, TOKENS[:, 5:], mutable=["carry"])
    np.testing.assert_allclose(np.concatenate([first, second], 1), complete, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("deterministic", [True, False])
def test_dropout_follows_the_setting(deterministic):
    model = RNNLM(vocab_size=7, d_model=4, dropout_rate=0.5, deterministic=deterministic)
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, TOKENS)
    a, b = (
        model.apply(variables, TOKENS, rngs={"dropout": jax.random.key(i)}, mutable=["carry"])[0]
        for i in (1, 2)
    )
    assert np.array_equal(a, b) == deterministic
