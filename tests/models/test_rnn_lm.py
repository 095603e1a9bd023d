import math

import jax
import numpy as np
import optax
import pytest

import tekoa
from tekoa.models import RNNLM

TOKENS = np.random.default_rng(0).integers(0, 7, (3, 10))


def test_every_token_has_logits_and_every_layer_a_carry():
    model = RNNLM(vocab_size=7, d_model=4, n_layers=2)
    logits, variables = model.init_with_output(jax.random.key(0), TOKENS)
    assert logits.shape == (3, 10, 7)
    assert sorted(variables["carry"]) == ["last_token", "layer_0", "layer_1"]


def test_two_halves_equal_the_complete_sequence():
    model = RNNLM(vocab_size=7, d_model=4)
    variables = model.init(jax.random.key(0), TOKENS)
    complete, _ = model.apply(variables, TOKENS, mutable=["carry"])
    first, changed = model.apply(variables, TOKENS[:, :5], mutable=["carry"])
    second, _ = model.apply({**variables, **changed}, TOKENS[:, 5:], mutable=["carry"])
    np.testing.assert_allclose(np.concatenate([first, second], 1), complete, rtol=1e-5, atol=1e-6)


def test_a_token_is_predicted_from_those_before_it():
    model = RNNLM(vocab_size=7, d_model=4)
    variables = model.init(jax.random.key(0), TOKENS)
    logits = model.apply(variables, TOKENS)
    other = TOKENS.copy()
    other[:, 6] = (other[:, 6] + 1) % 7
    changed = np.any(logits != model.apply(variables, other), axis=(0, 2))
    assert changed.tolist() == [False] * 7 + [True] * 3


@pytest.mark.slow
def test_random_tokens_cannot_be_predicted():
    rng = np.random.default_rng(1)
    batches = [(x, x) for x in rng.integers(0, 8, (120, 16, 10))]

    def loss(logits, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    model = RNNLM(vocab_size=8, d_model=16, n_layers=1)
    task = tekoa.TrainTask(optimizer=optax.adam(0.01), loss=loss, data=batches)
    loop = tekoa.TrainLoop(model, task, n_steps_per_checkpoint=40)
    losses = [float(checkpoint.loss) for checkpoint in loop]
    # The entropy of the tokens. A model that sees its targets would be far below.
    assert losses[-1] == pytest.approx(math.log(8), abs=0.03)


def test_the_defaults_are_those_of_the_guide():
    model = RNNLM(vocab_size=7)
    assert (model.d_model, model.n_layers, model.deterministic) == (512, 2, True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_dropout_follows_the_setting(deterministic):
    model = RNNLM(vocab_size=7, d_model=4, dropout_rate=0.5, deterministic=deterministic)
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, TOKENS)
    a, b = (
        model.apply(variables, TOKENS, rngs={"dropout": jax.random.key(i)}, mutable=["carry"])[0]
        for i in (1, 2)
    )
    assert np.array_equal(a, b) == deterministic
