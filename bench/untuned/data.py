"""The data of the tasks: MNIST, Penn Treebank and Shakespeare from a folder, and two made ones.

The folder is `$TEKOA_DATA` or `--data`; it holds `mnist/`, `ptb/` and `tiny_shakespeare/`.
"""

import functools
import gzip
import os
import pathlib

import numpy as np

Arrays = tuple[np.ndarray, ...]


def folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get("TEKOA_DATA", "data"))


# --- images --------------------------------------------------------------------------------


@functools.cache
def mnist() -> tuple[Arrays, Arrays]:
    """Training and test images, 28 x 28 in [0, 1], and their labels."""

    def read(name, header):
        with gzip.open(folder() / "mnist" / f"{name}.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    def split(name):
        images = read(f"{name}-images-idx3-ubyte", 16).reshape(-1, 28, 28)
        labels = read(f"{name}-labels-idx1-ubyte", 8)
        return images.astype(np.float32) / 255, labels.astype(np.int32)

    return split("train"), split("t10k")


def small_mnist(n_train: int = 12_000) -> tuple[Arrays, Arrays]:
    """MNIST at 14 x 14, by averaging, with fewer images."""

    def halve(images, labels, n):
        return images[:n].reshape(-1, 14, 2, 14, 2).mean((2, 4)), labels[:n]

    train, test = mnist()
    return halve(*train, n_train), halve(*test, 4000)


def images_only() -> tuple[Arrays, Arrays]:
    """MNIST images as flat vectors, the input and the target of an autoencoder."""
    (train, _), (test, _) = mnist()
    train, test = train.reshape(-1, 784), test.reshape(-1, 784)[:4000]
    return (train, train), (test, test)


def point_sets(n_points: int = 32) -> tuple[Arrays, Arrays]:
    """MNIST digits as sets of coordinates of bright pixels, in random order."""
    rng = np.random.default_rng(0)

    def sample(images, labels):
        points = []
        for image in images:
            places = np.argwhere(image > 0.5)
            points.append(places[rng.integers(0, len(places), n_points)])
        return (np.stack(points).astype(np.float32) - 14) / 7, labels

    (train, train_labels), (test, test_labels) = mnist()
    return sample(train[:12_000], train_labels[:12_000]), sample(test[:4000], test_labels[:4000])


def sklearn_digits() -> tuple[Arrays, Arrays]:
    """1797 digits of 8 x 8 pixels in 0..16, as scikit-learn bundles them."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].astype(np.float32), labels[order].astype(np.int32)
    return (images[:1200], labels[:1200]), (images[1200:], labels[1200:])


# --- text ----------------------------------------------------------------------------------


@functools.cache
def characters() -> tuple[np.ndarray, np.ndarray]:
    """Shakespeare as numbers 0..64: the first 90 % to train, the rest to test."""
    text = (folder() / "tiny_shakespeare" / "input.txt").read_bytes()
    tokens = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)[1].astype(np.int32)
    n_train = int(0.9 * len(tokens))
    return tokens[:n_train], tokens[n_train:]


@functools.cache
def words() -> tuple[np.ndarray, np.ndarray]:
    """Penn Treebank as numbers by falling frequency, 10,000 words, with ends of sentences."""

    def read(name):
        text = (folder() / "ptb" / f"ptb.{name}.txt").read_text()
        return text.replace("\n", "<eos>").split()

    train = read("train")
    by_word, inverse, counts = np.unique(train, return_inverse=True, return_counts=True)
    rank = np.empty(len(counts), np.int32)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    numbers = dict(zip(by_word, rank))
    return rank[inverse], np.array([numbers[word] for word in read("valid")], np.int32)


def next_word_classes(n_classes: int = 64) -> tuple[Arrays, Arrays]:
    """Three words in a row, and which frequent word comes next, or (the last class) another.

    A few of the words are in every batch, and most of them are seen a handful of times.
    """

    def cut(tokens):
        triples = np.stack([tokens[i : len(tokens) - 3 + i] for i in range(3)], 1)
        return triples, np.minimum(tokens[3:], n_classes - 1)

    train, test = words()
    return cut(train), cut(test[:20_000])


# --- made ----------------------------------------------------------------------------------


def unscaled_regression() -> tuple[Arrays, Arrays]:
    """40 inputs with scales e^N(0,1), and noisy targets of rms 7 of a random network."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    scales = np.exp(normal(40))
    hidden, out = normal(40, 8) / np.sqrt(40), normal(8, 1) / np.sqrt(8)
    x = normal(24_000, 40)
    y = 12 * np.tanh(x @ hidden) @ out + 0.5 * normal(24_000, 1)
    x = x * scales
    return (x[:20_000], y[:20_000]), (x[20_000:], y[20_000:])


def graphs(n_graphs: int = 6000, n_nodes: int = 16) -> tuple[Arrays, Arrays]:
    """Random graphs with node features; the target counts, per node, who is near in the graph.

    Node i should find the mean over its neighbours' neighbours of a product of two features.
    """
    rng = np.random.default_rng(0)
    edges = rng.random((n_graphs, n_nodes, n_nodes)) < 0.2
    edges = np.triu(edges, 1)
    adjacency = (edges | edges.swapaxes(1, 2) | np.eye(n_nodes, dtype=bool)).astype(np.float32)
    adjacency /= adjacency.sum(-1, keepdims=True)
    features = rng.standard_normal((n_graphs, n_nodes, 8)).astype(np.float32)
    target = adjacency @ adjacency @ (features[..., :1] * features[..., 1:2])
    target = 10 * (target + 0.1 * adjacency @ np.abs(features[..., 2:3])).astype(np.float32)
    x, n_train = (features, adjacency, target), n_graphs - 1000
    return tuple(a[:n_train] for a in x), tuple(a[n_train:] for a in x)
