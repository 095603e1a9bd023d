"""The head of an ejected file."""

import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.document import _check_names, _imports


def test_imports_are_sorted_and_used():
    body = "x = jnp.sqrt(np.ones(3)) + math.pi + nn.relu(re.a)"
    others = ["from flax import linen as nn", "import re", "import collections", ""]
    assert _imports(body, others).split("\n") == [
        "import math",
        "import re",
        "",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from flax import linen as nn",
    ]


def test_a_name_that_is_bound_twice_is_refused():
    with pytest.raises(UsageError, match="'mean' would mean two things"):
        _check_names("def mean(x):\n    return x / 2\n\nmean = partial(loss, 3)")
    _check_names("def f(mean):\n    return mean\n\nmean = f(3)")
