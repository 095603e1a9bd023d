"""TextSamples: adds text that the model writes to a checkpoint, for logs.

A sample is a function of the checkpoint alone: of its parameters, and of its root key and step. A
resumed run writes the same ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tekoa import hosts
from tekoa.bridges import any_model
from tekoa.core import messages, objective
from tekoa.core.model import Variables, run_model
from tekoa.core.trees import PyTree
from tekoa.extensions.generation.generate import check_options, generate
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary
from tekoa.loop.media import Text
from tekoa.sharding.layout import Layout
from tekoa.sharding.placement import Placement

# Separates the key of samples from those of the steps.
_SAMPLES = 0x7E47
# Relative differences of logits below this are rounding.
_NOISE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFns:
    """How a language model reads and writes text.

    Attributes:
        encode: `encode(text)` returns the tokens of a prompt, at least one: the start token, if
            the text is empty.
        decode: `decode(tokens)` returns the text of tokens.
        length: The most tokens that the model sees at once; None for no limit.
        inputs: `inputs(tokens)` returns the inputs of the model for tokens (rows, length): the
            tokens themselves by default.
        logits: `logits(*outputs)` returns the logits (rows, length, vocabulary) of the token after
            each of these: the first output by default.

    >>> fns = TextFns(encode=lambda text: list(text.encode()), decode=lambda ids: bytes(ids))
    >>> fns.decode(fns.encode('abc'))
    b'abc'
    """

    encode: Callable[[str], Sequence[int] | np.ndarray]
    decode: Callable[[Sequence[int]], str]
    length: int | None = None
    inputs: Callable[[jax.Array], Any] = lambda tokens: tokens
    logits: Callable[..., Any] = lambda *outputs: outputs[0]


class TextSamples:
    """Adds text that the model writes to a checkpoint, and prints it; a stage for `serial`.

    Place it before the writers of logs. The moving average of the parameters is used if there is
    one. `when(EverySteps(1000), TextSamples(...))` writes a sample now and then.

    Args:
        model: The model, as passed to `TrainLoop` or `fit`.
        text: How it reads and writes text.
        prompt: The text to continue.
        n_tokens: How many tokens to write.
        temperature: Divides the logits; 0 always chooses the likeliest token.
        top_p: Only the likeliest tokens whose probabilities add up to this are drawn.
        name: The name of the samples in logs.
        apply: The function that runs the model, if `model` does not include it.
        layout: The mesh to run on, as for `TrainLoop`.
        write: Called with the text of each sample; prints it by default. None for logs only.

    Raises:
        ValueError: If the prompt has no tokens, or an option is out of range.
    """

    def __init__(
        self,
        model: Any,
        text: TextFns,
        *,
        prompt: str = "",
        n_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        name: str = "sample",
        apply: Callable[..., Any] | None = None,
        layout: Layout | None = None,
        write: Callable[[str], object] | None = print,
    ):
        self._fns, self._text = any_model.as_model_fns(model, apply), text
        self._name, self._write = name, write
        self._options: dict[str, Any] = {
            "n_tokens": n_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "length": text.length,
        }
        check_options(**self._options)
        self._tokens = np.array([text.encode(prompt)], np.int32)
        if not self._tokens.size:
            raise ValueError(
                f"The prompt {prompt!r} has no tokens. Use a longer one, or let `encode` begin "
                "with the token that starts a text."
            )
        self._place = Placement(layout)
        self._inputs = jax.jit(text.inputs)
        self._new_carry = jax.jit(functools.partial(objective.new_carry, self._fns))
        self._generate = self._place.jit_gathered(self._continued)
        self._compare = self._place.jit_gathered(self._dependences)
        self._is_checked = False

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns the checkpoint with a sample; all processes take part.

        Raises:
            ValueError: If the logits of the model are not of the token after each position.
        """
        state = checkpoint.state
        tokens = self._place.whole(self._tokens)
        inputs = _as_tuple(self._inputs(tokens))
        params, variables = self._place.model(self._fns, state.eval_params, state.variables, inputs)
        if state.carry is not None:
            carry = self._new_carry(jax.random.key(0), inputs)
            variables = objective.merge_carry(variables, carry)
        if not self._is_checked:
            self._check_causal(params, variables)
        new, _ = self._generate(params, variables, tokens, state.rng, np.uint32(checkpoint.step))
        sample = self._text.decode([*self._tokens[0].tolist(), *np.asarray(new)[0].tolist()])
        if self._write is not None and hosts.current().is_writer:
            self._write(f"{self._name} at step {checkpoint.step}:\n{messages.printable(sample)}\n")
        return as_summary(checkpoint).with_media(self._name, Text(sample))

    def _continued(
        self, params: PyTree, variables: Variables, tokens: jax.Array, rng: jax.Array, step: Any
    ) -> tuple[jax.Array, None]:
        """Returns the tokens that continue the prompt, and nothing that stays sharded."""
        apply = functools.partial(self._logits, variables)
        key = jax.random.fold_in(jax.random.fold_in(rng, _SAMPLES), step)
        return generate(apply, params, tokens, key, **self._options), None

    def _logits(self, variables: Variables, params: PyTree, tokens: jax.Array) -> Any:
        inputs = _as_tuple(self._text.inputs(tokens))
        rng = jax.random.key(0)
        outputs, _ = run_model(self._fns, params, variables, inputs, rng=rng, train=False)
        return self._text.logits(*outputs)

    def _check_causal(self, params: PyTree, variables: Variables) -> None:
        """Raises if the logits of a position are not of the token after it.

        Raises:
            ValueError: If they see that token, or not even the one of the position itself.
        """
        tokens = np.pad(self._tokens, ((0, 0), (0, 1)))[:, -(self._text.length or 0) :]
        if tokens.shape[1] < 2:
            return
        (later, own, next_one), _ = self._compare(params, variables, self._place.whole(tokens))
        if later:
            raise ValueError(
                "The model cannot write text: its logits depend on later tokens. Those of a "
                "position must depend on the tokens up to it only: use a causal mask."
            )
        if next_one and not own:
            raise ValueError(
                "The logits of the model are of the tokens themselves, not of those after them. "
                "Let `inputs` of TextFns append a token, and `logits` drop those of the first."
            )
        # Before training, a model may not depend on its inputs at all.
        self._is_checked = bool(own)

    def _dependences(
        self, params: PyTree, variables: Variables, tokens: jax.Array
    ) -> tuple[list[jax.Array], None]:
        """Returns whether the logits of the last token but one depend on the last and on itself.

        Also, whether the logits of the last one depend on the last but one.
        """
        base, *others = (
            self._logits(variables, params, tokens.at[:, at].set(token))
            for at, token in ((-1, tokens[:, -1]), (-1, 1), (-2, (tokens[:, -2] == 0).astype(int)))
        )
        later, own = others
        pairs = ((base[:, -2], later[:, -2]), (base[:, -2], own[:, -2]), (base[:, -1], own[:, -1]))
        return [
            jnp.max(jnp.abs(a - b)) > _NOISE * jnp.maximum(1, jnp.max(jnp.abs(a))) for a, b in pairs
        ], None


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)
