"""The head of an ejected file."""

import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject.document import _check_names, _imports


def test_imports_are_sorted_and_used():
    body = "x = jnp.sqrt(np.ones(3)) + math.pi"
    assert _imports(body, ["from flax import linen as nn", "import re", ""]).split("\n") == [
        "import math",
        "import re",
        "",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from flax import linen as nn",
    ]


def test_a_name_that_a_later_line_binds_again_is_refused():
    helper = "def mean(x):\n    return x / 2\n"
    user = "def loss(x):\n    return mean(x)\n"
    with pytest.raises(UsageError, match="'mean' would mean two things"):
        _check_names(f"{helper}{user}mean = partial(loss, 3)")
    # The name is used before it is bound again, or a variable of the function has it.
    _check_names(f"{helper}mean = partial(mean, 3)\n{user}")
    _check_names(f"{helper}def f(mean):\n    return mean\nmean = f(3)")
