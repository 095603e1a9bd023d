"""RNNLM: a small LSTM language model in Linen, used by the examples."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn


class RNNLM(nn.Module):
    """Predicts each token from those before it, so inputs and targets are the same tokens.

    The last token and the state of each layer are kept in the collection "carry": a batch
    continues the text of the batch before it. Before the first token stands token 0.

    Attributes:
        vocab_size: Number of tokens.
        d_model: Width of the embedding and the layers.
        n_layers: Number of LSTM layers.
        dropout_rate: Dropout of the embedding and of each layer's output.
        deterministic: Whether to disable dropout. Set it to False for training.

    >>> model = RNNLM(vocab_size=50, d_model=8)
    >>> tokens = jnp.zeros((2, 5), jnp.int32)
    >>> variables = model.init(jax.random.key(0), tokens)
    >>> model.apply(variables, tokens).shape
    (2, 5, 50)
    """

    vocab_size: int
    d_model: int = 512
    n_layers: int = 2
    dropout_rate: float = 0.1
    deterministic: bool = True

    @nn.compact
    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """Returns logits (rows, length, vocabulary) of the same tokens, from those before them."""
        drop = functools.partial(
            nn.Dropout, self.dropout_rate, deterministic=self.deterministic, broadcast_dims=(1,)
        )
        x = drop()(nn.Embed(self.vocab_size, self.d_model)(self._shifted(tokens_BxL)))
        for i in range(self.n_layers):
            layer = nn.RNN(nn.OptimizedLSTMCell(self.d_model), return_carry=True)
            carry = self.variable("carry", f"layer_{i}", self._zeros, tokens_BxL.shape[0])
            last, x = layer(x, initial_carry=carry.value)
            if self._keeps_carry():
                carry.value = jax.lax.stop_gradient(last)
            x = drop()(x)
        return nn.Dense(self.vocab_size)(x)

    def _shifted(self, tokens_BxL: jax.Array) -> jax.Array:
        """Returns the tokens moved to the right by one, after the last one of the batch before."""
        tokens_BxL = jnp.asarray(tokens_BxL)
        zeros = lambda: jnp.zeros(tokens_BxL.shape[:1], tokens_BxL.dtype)  # noqa: E731
        last_token = self.variable("carry", "last_token", zeros)
        shifted = jnp.concatenate([last_token.value[:, None], tokens_BxL[:, :-1]], axis=1)
        if self._keeps_carry():
            last_token.value = tokens_BxL[:, -1]
        return shifted

    def _keeps_carry(self) -> bool:
        """Whether the carry may change: not at initialisation, nor in a call without `mutable`."""
        return not self.is_initializing() and self.is_mutable_collection("carry")

    def _zeros(self, n_rows: int) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros((n_rows, self.d_model), jnp.float32)
        return zeros, zeros
