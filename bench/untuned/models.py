"""The networks of the tasks, as ordinary Linen modules with their usual initialisation."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn


class Mlp(nn.Module):
    """Dense layers with an activation between them."""

    widths: Sequence[int]
    activation: Callable = nn.relu

    @nn.compact
    def __call__(self, x, train=False):
        x = x.reshape(x.shape[0], -1)
        for width in self.widths[:-1]:
            x = self.activation(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


class ResidualMlp(nn.Module):
    """Blocks of norm, wide layer and narrow layer, added to the stream."""

    width: int = 64
    n_blocks: int = 6
    n_classes: int = 10

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(self.width)(x.reshape(x.shape[0], -1))
        for _ in range(self.n_blocks):
            y = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(y)
        return nn.Dense(self.n_classes)(nn.LayerNorm()(x))


class Cnn(nn.Module):
    """Convolutions with pooling, optionally batch norm, and two dense layers."""

    features: Sequence[int] = (16, 32)
    dense: int = 64
    batch_norm: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        x = x[..., None]
        for n in self.features:
            x = nn.Conv(n, (3, 3), use_bias=not self.batch_norm)(x)
            if self.batch_norm:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.avg_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(self.dense)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


class Attention(nn.Module):
    """Multi-head attention with a joint projection of queries, keys and values."""

    n_heads: int
    causal: bool

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width, use_bias=False)(x)
        q, k, v = jnp.split(qkv.reshape(batch, length, self.n_heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(width / self.n_heads)
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
        return nn.Dense(width, use_bias=False)(mixed.reshape(batch, length, width))


class Blocks(nn.Module):
    """A stack of transformer blocks with norms before each branch."""

    n_layers: int
    n_heads: int
    causal: bool

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        for _ in range(self.n_layers):
            x = x + Attention(self.n_heads, self.causal)(nn.LayerNorm(use_bias=False)(x))
            y = nn.Dense(4 * width, use_bias=False)(nn.LayerNorm(use_bias=False)(x))
            x = x + nn.Dense(width, use_bias=False)(nn.gelu(y))
        return nn.LayerNorm(use_bias=False)(x)


class Transformer(nn.Module):
    """A language model with learned positions; the output is tied to the embedding or not."""

    vocab: int = 65
    width: int = 64
    n_layers: int = 2
    n_heads: int = 4
    tied: bool = False

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = nn.Embed(self.vocab, self.width)
        x = embed(tokens) + nn.Embed(tokens.shape[1], self.width)(jnp.arange(tokens.shape[1]))
        x = Blocks(self.n_layers, self.n_heads, causal=True)(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocab, use_bias=False)(x)


class Vit(nn.Module):
    """A transformer on the patches of an image, with the mean of the tokens classified."""

    patch: int = 7
    width: int = 48
    n_layers: int = 2

    @nn.compact
    def __call__(self, images, train=False):
        n, size = images.shape[0], images.shape[1] // self.patch
        x = images.reshape(n, size, self.patch, size, self.patch).swapaxes(2, 3)
        x = nn.Dense(self.width)(x.reshape(n, size**2, -1))
        x = x + self.param("positions", nn.initializers.normal(0.02), (size**2, self.width))
        x = Blocks(self.n_layers, n_heads=4, causal=False)(x)
        return nn.Dense(10)(x.mean(1))


class Lstm(nn.Module):
    """A recurrent language model on words."""

    vocab: int = 10_000
    width: int = 32

    @nn.compact
    def __call__(self, tokens, train=False):
        x = nn.Embed(self.vocab, self.width)(tokens)
        x = nn.RNN(nn.OptimizedLSTMCell(self.width))(x)
        return nn.Dense(self.vocab)(x)


class Bag(nn.Module):
    """Embeddings of three words of many, joined, into a small network."""

    vocab: int = 10_000
    width: int = 24
    n_classes: int = 64

    @nn.compact
    def __call__(self, tokens, train=False):
        x = nn.Embed(self.vocab, self.width)(tokens).reshape(tokens.shape[0], -1)
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(self.n_classes)(x)


class DeepSet(nn.Module):
    """A network on each point, the mean of the points, and a network on that."""

    width: int = 64

    @nn.compact
    def __call__(self, points, train=False):
        for _ in range(3):
            points = nn.relu(nn.Dense(self.width)(points))
        x = nn.relu(nn.Dense(self.width)(points.mean(1)))
        return nn.Dense(10)(x)


class GraphNet(nn.Module):
    """Rounds of messages: own features and the mean of the neighbours'."""

    width: int = 48
    n_rounds: int = 3

    @nn.compact
    def __call__(self, features, adjacency, train=False):
        x = nn.relu(nn.Dense(self.width)(features))
        for _ in range(self.n_rounds):
            neighbours = adjacency @ nn.Dense(self.width, use_bias=False)(x)
            x = nn.relu(nn.Dense(self.width)(x) + neighbours)
        return nn.Dense(1)(x)


def softmax_loss(logits, labels):
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, labels[..., None], -1).mean()


def accuracy(logits, labels):
    return (logits.argmax(-1) == labels).mean()


def pixel_loss(logits, pixels):
    """Binary cross-entropy, summed over the pixels of an image."""
    return (jax.nn.softplus(logits) - pixels * logits).sum(-1).mean()


def squared_loss(outputs, targets):
    return jnp.square(outputs - targets).mean()
