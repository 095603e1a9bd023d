import dataclasses

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tekoa import as_model_fns, init_state
from tekoa.extensions.generation.samples import TextFns, TextSamples
from tekoa.loop.checkpoint import Summary
from tekoa.loop.media import Text
from tekoa.models import RNNLM
from tekoa.testing import count_compilations

V = 128
ASCII = TextFns(
    encode=lambda text: list(text.encode("ascii")),
    decode=lambda tokens: bytes(tokens).decode("ascii"),
)
# After each letter comes the next one.
NEXT = np.roll(9.0 * np.eye(V, dtype=np.float32), 1, axis=1)


class LinenTable(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Embed(V, V)(tokens)


class NNXTable(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.zeros((V, V)))

    def __call__(self, tokens):
        return self.table[tokens]


class EquinoxTable(eqx.Module):
    table: jax.Array

    def __call__(self, tokens):
        return self.table[tokens]


def haiku_table(tokens):
    return hk.Embed(V, V)(tokens)


MODELS = {
    "linen": LinenTable,
    "nnx": NNXTable,
    "equinox": lambda: EquinoxTable(jnp.zeros((V, V))),
    "haiku": lambda: hk.transform(haiku_table),
}


def checkpoint_of(model, step=0, table=NEXT, **options):
    tokens = jnp.zeros((1, 4), jnp.int32)
    state = init_state(model, optax.sgd(0.1), jax.random.key(7), inputs=(tokens,), **options)
    if table is not None:
        state = state.replace(params=jax.tree.map(lambda _: jnp.asarray(table), state.params))
    return Summary(state=state, step=step)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_model_of_any_library_writes_text(make):
    model, written = make(), []
    options = {"prompt": "abc", "n_tokens": 4, "temperature": 0.0, "write": written.append}
    sampled = TextSamples(model, ASCII, **options)(checkpoint_of(model, step=3))
    assert sampled.media == {"sample": Text("abcdefg")}
    assert written == ["sample at step 3:\nabcdefg\n"]


def test_samples_depend_on_the_checkpoint_and_its_step_only():
    model, table = LinenTable(), np.zeros((V, V), np.float32)
    first, second = (
        TextSamples(model, ASCII, prompt="a", n_tokens=30, write=None) for _ in range(2)
    )
    checkpoints = {step: checkpoint_of(model, step, table) for step in (1, 2)}
    texts = {step: first(c).media["sample"].value for step, c in checkpoints.items()}
    assert texts[1] != texts[2]
    # Another start of the program begins with the second one.
    assert second(checkpoints[2]).media["sample"].value == texts[2]
    with count_compilations() as compiled:
        assert second(checkpoints[1]).media["sample"].value == texts[1]
    assert compiled.total == 0


def test_the_moving_average_writes_if_there_is_one():
    model = LinenTable()
    checkpoint = checkpoint_of(model, ema=0.9)
    backwards = jax.tree.map(lambda x: x.T, checkpoint.state.params)
    state = dataclasses.replace(checkpoint.state, average=backwards)
    samples = TextSamples(model, ASCII, prompt="f", n_tokens=3, temperature=0.0, write=None)
    sampled = samples(dataclasses.replace(checkpoint, state=state))
    assert sampled.media["sample"].value == "fedc"


def test_a_model_with_a_carry_starts_from_a_new_one():
    model = RNNLM(V, d_model=8, n_layers=1)
    checkpoint = checkpoint_of(model, table=None)
    carried = checkpoint.state.replace(carry=jax.tree.map(lambda x: x + 1, checkpoint.state.carry))
    text = dataclasses.replace(
        ASCII,
        inputs=lambda tokens: jnp.pad(tokens, ((0, 0), (0, 1))),
        logits=lambda logits: logits[:, 1:],
    )
    samples = TextSamples(model, text, prompt="ab", n_tokens=5, temperature=0.0, write=None)
    fns, tokens, key = as_model_fns(model), [97, 98], jax.random.key(0)
    for _ in range(5):
        row = jnp.array([[*tokens, 0]])
        variables = {"carry": checkpoint.state.carry}
        logits, _ = fns.apply(checkpoint.state.params, variables, (row,), rng=key, train=False)
        tokens.append(int(jnp.argmax(logits[0, -1])))
    for state in (checkpoint.state, carried):
        sampled = samples(dataclasses.replace(checkpoint, state=state))
        assert sampled.media["sample"].value == bytes(tokens).decode()


class SeesAll(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Embed(V, V)(tokens) + nn.Embed(V, V)(tokens).mean(axis=1, keepdims=True)


class SeesBefore(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Embed(V, V)(jnp.pad(tokens[:, :-1], ((0, 0), (1, 0))))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SeesAll(), "its logits depend on later tokens"),
        (SeesBefore(), "are of the tokens themselves, not of those after them"),
    ],
)
def test_a_model_whose_logits_are_not_of_the_next_token_is_refused(model, message):
    samples = TextSamples(model, ASCII, prompt="abc", n_tokens=2)
    with pytest.raises(ValueError, match=message):
        samples(checkpoint_of(model, table=None))


def test_a_terminal_gets_no_control_characters():
    model, written = LinenTable(), []
    samples = TextSamples(model, ASCII, prompt="\x1b[2J", n_tokens=1, write=written.append)
    assert samples(checkpoint_of(model)).media["sample"].value.startswith("\x1b[2J")
    assert "\\x1b[2J" in written[0]
    assert "\x1b" not in written[0]


def test_mistakes_are_named_before_training():
    with pytest.raises(ValueError, match="The prompt '' has no tokens"):
        TextSamples(LinenTable(), ASCII)
    with pytest.raises(ValueError, match="top_p must be above 0"):
        TextSamples(LinenTable(), ASCII, prompt="a", top_p=0.0)
