"""The body of `experiment` as statements of a file."""

import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.forms import _flattened

TEXT = """def experiment():
    width = f(3)

    def loss(out, batch):
        return out

    return Experiment(
        model=Net(width), loss=loss, inputs=lambda batch: batch["x"], optimizer=optax.sgd(1.0)
    )
"""


def test_experiment_becomes_statements():
    blocks, optimizer = _flattened(TEXT)
    assert [block.strip() for block in blocks] == [
        "width = f(3)",
        "def loss(out, batch):\n    return out",
        "model = Net(width)",
        'def inputs(batch):\n    return batch["x"]',
    ]
    assert optimizer == "optax.sgd(1.0)"


def test_other_results_are_refused():
    with pytest.raises(UsageError, match="return Experiment"):
        _flattened("def experiment():\n    return made")
