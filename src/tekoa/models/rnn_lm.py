"""RNNLM: a small LSTM language model in Linen, used by the examples."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn


class RNNLM(nn.Module):
    """Predicts the next token; keeps its LSTM state in the collection "carry".

    Attributes:
        vocab_size: Number of tokens.
        d_model: Width of the embedding and the layers.
        n_layers: Number of LSTM layers.
        dropout_rate: Dropout of the embedding and of each layer's output.
        deterministic: Whether to disable dropout, for evaluation.
    """

    vocab_size: int
    d_model: int = 64
    n_layers: int = 1
    dropout_rate: float = 0.1
    deterministic: bool = False

    @nn.compact
    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """Returns logits (rows, length, vocabulary)."""
        drop = functools.partial(
            nn.Dropout, self.dropout_rate, deterministic=self.deterministic, broadcast_dims=(1,)
        )
        x = drop()(nn.Embed(self.vocab_size, self.d_model)(tokens_BxL))
        for i in range(self.n_layers):
            layer = nn.RNN(nn.OptimizedLSTMCell(self.d_model), return_carry=True)
            carry = self.variable("carry", f"layer_{i}", self._zeros, tokens_BxL.shape[0])
            last, x = layer(x, initial_carry=carry.value)
            if not self.is_initializing():
                carry.value = jax.lax.stop_gradient(last)
            x = drop()(x)
        return nn.Dense(self.vocab_size)(x)

    def _zeros(self, n_rows: int) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros((n_rows, self.d_model), jnp.float32)
        return zeros, zeros
