"""Sources of all kinds with the same examples, for tests that apply to all of them."""

import numpy as np
import pytest

from support import files
from tekoa import data


class Resumable:
    """An iterable whose iterator has a position, as grain's do."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return _ResumableIterator(self.n)


class _ResumableIterator:
    def __init__(self, n):
        self.n, self.at = n, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return {"x": self.at - 1}

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


KINDS = ("arrays", "sequence", "lines", "iterable", "resumable", "two_arrays")


@pytest.fixture(scope="session")
def make_source(tmp_path_factory):
    """Returns a function that creates a source of the examples {'x': 0} ... {'x': n - 1}."""
    folder = tmp_path_factory.mktemp("lines")

    def make(kind, n):
        if kind == "arrays":
            return data.as_source({"x": np.arange(n)})
        if kind == "sequence":
            return data.as_source([{"x": at} for at in range(n)])
        if kind == "iterable":
            return data.as_source(lambda: ({"x": at} for at in range(n)))
        if kind == "resumable":
            return data.as_source(Resumable(n))
        if kind == "two_arrays" and n > 1:
            for name, rows in (("a", np.arange(n // 3 + 1)), ("b", np.arange(n // 3 + 1, n))):
                np.savez(folder / f"{name}{n}.npz", x=rows)
            names = [f"{folder}/{name}{n}.npz" for name in "ab"]
            return data.load(names if n // 3 + 1 < n else names[:1])
        path = folder / f"{n}.jsonl"
        if not path.exists():
            path.write_text("".join(f'{{"x": {at}}}\n' for at in range(n)))
        return data.load(str(path))

    return make


@pytest.fixture(scope="session")
def mnist():
    """The directory of the real MNIST files."""
    return files.data_set("mnist")


@pytest.fixture(scope="session")
def ptb():
    """The directory of the Penn Treebank text."""
    return files.data_set("ptb")
