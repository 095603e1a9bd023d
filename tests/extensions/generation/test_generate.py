"""Greedy, temperature and nucleus sampling against numbers computed in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tekoa.extensions.generation.generate import generate
from tekoa.testing import count_compilations

V = 6
N_DRAWS = 40_000


@pytest.fixture(scope="module")
def table():
    """The logits of the token after each token."""
    return np.random.default_rng(0).normal(scale=2.0, size=(V, V)).astype(np.float32)


def after(table, tokens):
    return jnp.asarray(table)[tokens]


def seen_so_far(params, tokens):
    """The next token is the sum of those that are seen, modulo V."""
    return jax.nn.one_hot(jnp.cumsum(tokens, axis=1) % V, V) * params


def test_greedy_tokens_are_those_of_argmax_by_hand(table):
    expected, token = [], 3
    for _ in range(8):
        token = int(np.argmax(table[token]))
        expected.append(token)
    tokens = generate(after, table, [1, 3], n_tokens=8, temperature=0.0)
    assert tokens.tolist() == expected
    assert tokens.dtype == jnp.int32


def test_every_row_continues_its_own_prompt(table):
    prompts = [[1, 3], [0, 2], [5, 5]]
    rows = generate(after, table, prompts, n_tokens=5, temperature=0.0)
    single = [generate(after, table, p, n_tokens=5, temperature=0.0).tolist() for p in prompts]
    assert rows.tolist() == single


@pytest.mark.parametrize("length", [None, 2, 3, 4, 20])
def test_the_model_sees_all_tokens_or_the_last_ones(length):
    tokens = [1, 2, 4]
    for _ in range(7):
        tokens.append(sum(tokens[-length:] if length else tokens) % V)
    options = {"n_tokens": 7, "temperature": 0.0, "length": length}
    assert generate(seen_so_far, 1.0, [1, 2, 4], **options).tolist() == tokens[3:]


def numpy_distribution(logits, temperature, top_p):
    """The probabilities of the smallest set of the likeliest tokens that has `top_p` in total."""
    weights = np.exp(np.asarray(logits, np.float64) / temperature)
    probabilities = weights / weights.sum()
    total, nucleus = 0.0, []
    for token in sorted(range(V), key=lambda i: -probabilities[i]):
        nucleus.append(token)
        total += probabilities[token]
        if total >= top_p:
            break
    return np.array([probabilities[i] / total if i in nucleus else 0.0 for i in range(V)])


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (1.5, 0.9)]
)
def test_frequencies_are_those_of_the_distribution(table, temperature, top_p):
    prompts = np.full((N_DRAWS, 1), 2)
    options = {"n_tokens": 2, "temperature": temperature, "top_p": top_p}
    tokens = np.asarray(generate(after, table, prompts, jax.random.key(1), **options))
    first = numpy_distribution(table[2], temperature, top_p)
    # The second token is drawn after the first one.
    second = sum(first[i] * numpy_distribution(table[i], temperature, top_p) for i in range(V))
    for i, expected in enumerate((first, second)):
        frequencies = np.bincount(tokens[:, i], minlength=V) / N_DRAWS
        deviation = np.sqrt(expected * (1 - expected) / N_DRAWS)
        assert (abs(frequencies - expected) <= 5 * deviation).all()


def test_a_nucleus_of_equal_tokens_is_no_larger_than_necessary():
    tokens = generate(
        lambda params, tokens: jnp.zeros((*tokens.shape, 4)),
        None,
        np.zeros((2000, 1)),
        jax.random.key(0),
        n_tokens=1,
        top_p=0.5,
    )
    assert len(np.unique(tokens)) == 2


def test_it_is_a_pure_function_of_its_arguments_that_compiles_once(table):
    @jax.jit
    def run(table, key):
        return generate(after, table, [2], key, n_tokens=20)

    first = run(table, jax.random.key(0))
    with count_compilations() as compiled:
        again, other = run(table, jax.random.key(0)), run(table, jax.random.key(1))
    assert compiled.total == 0
    assert first.tolist() == again.tolist() != other.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_tokens": 0}, "n_tokens must be 1 or more, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0"),
        ({"length": 0}, "length must be 1 or more"),
        ({"rng": None}, "needs a key"),
        ({"prompt": []}, "at least one token"),
        ({"apply": lambda params, tokens: tokens}, r"logits \(rows, length, vocabulary\)"),
    ],
)
def test_mistakes_are_named(table, changes, message):
    arguments = {"apply": after, "prompt": [1], "rng": jax.random.key(0), "n_tokens": 2, **changes}
    with pytest.raises(ValueError, match=message):
        generate(params=table, **arguments)
