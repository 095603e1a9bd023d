"""The model card: what an exported file contains, as JSON beside it."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import tekoa
from tekoa.core import messages
from tekoa.exchange.trained import Trained
from tekoa.store.commit import durable

SUFFIX = ".json"


def write(path: pathlib.Path, trained: Trained, **facts: Any) -> pathlib.Path:
    """Writes the card of an exported file and returns its path.

    Args:
        path: The exported file; the card is beside it, with `.json` at the end of the name.
        trained: The weights.
        **facts: Further entries, such as `format` and `inputs`.
    """
    sizes = [np.shape(leaf) for leaf in jax.tree.leaves(trained.params)]
    card = {
        "file": path.name,
        **facts,
        "step": trained.step,
        "metrics": {k: x if np.isfinite(x) else None for k, x in trained.metrics.items()},
        "n_parameters": int(sum(np.prod(shape, dtype=np.int64) for shape in sizes)),
        "checkpoint": trained.commit or None,
        "versions": {"tekoa": tekoa.__version__, "jax": jax.__version__},
    }
    target = path.with_name(path.name + SUFFIX)
    durable.replace(target, json.dumps(card, indent=1).encode())
    return target


def describe(kind: str, tree: Any) -> list[dict[str, Any]]:
    """Describes arrays or shapes, in the order of a program's arguments.

    >>> describe('input', (np.zeros((2, 3), np.float32),))
    [{'name': 'input_0', 'shape': [2, 3], 'dtype': 'float32'}]
    """
    return [
        {
            "name": f"{kind}_{i}",
            "shape": [n if isinstance(n, int) else str(n) for n in leaf.shape],
            "dtype": str(leaf.dtype),
        }
        for i, leaf in enumerate(jax.tree.leaves(tree))
    ]


def arrays(named: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Describes arrays by name, such as {'fc.weight': 'float32[4,2]'}."""
    return {name: messages.array_text(x.dtype, x.shape) for name, x in named.items()}
