"""The examples of a run, stored once each."""

import itertools
import pathlib

import numpy as np
import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import examples


@pytest.mark.parametrize("kind", [dict, tuple, np.ndarray])
def test_stored_batches_are_those_of_the_run(kind, tmp_path):
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)

    def batch(at):
        fields = {"x": rows[at], "y": np.int64(at)}
        return fields if kind is dict else tuple(fields.values()) if kind is tuple else rows[at]

    batches = [batch(at) for at in ([0, 1], [4, 0], [1, 4])]
    stored = examples.read(itertools.cycle(batches), 5)
    stored.save(tmp_path / "plain.npz")
    assert len(stored.rows[0]) == 3
    names = {"np": np, "pathlib": pathlib, "__file__": str(tmp_path / "plain.py")}
    exec(stored.code(), names)
    for i in range(5):
        read, expected = names["batch_of"](i), batches[i % 3]
        assert type(read) is type(expected)
        pairs = zip(read.values(), expected.values()) if kind is dict else zip(read, expected)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_batches_that_are_no_arrays_are_refused():
    with pytest.raises(UsageError, match="dicts or tuples"):
        examples.read([{"x": "text"}], 1)
    with pytest.raises(UsageError, match="differ in size"):
        examples.read([np.zeros((2, 1)), np.zeros((1, 1))], 2)
