"""The head of an ejected file."""

from tekoa.estimator.eject.document import _imports


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
