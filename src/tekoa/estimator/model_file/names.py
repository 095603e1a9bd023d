"""The names of models. Imports no JAX, so that a mistyped name is reported at once."""

import importlib.util
import sys

from tekoa.core import files, messages
from tekoa.estimator.cli.flags import UsageError

BUNDLED = ("linear_regression", "mnist", "lstm_lm", "transformer_lm")


def check_model(name: str | None) -> str:
    """Returns the name of a model after checking that it exists, without importing it.

    Args:
        name: A bundled name, a module name or the path of a .py file.

    Raises:
        UsageError: If no such model exists.
    """
    if not name:
        raise UsageError(
            "No model given. Name one: `tekoa train mnist`, or --module_imp=my.module. "
            "`tekoa models` lists the bundled models."
        )
    if name.endswith(".py"):
        if not files.local_path(name).is_file():
            raise UsageError(f"There is no model file {name!r}.")
    elif name not in BUNDLED and not _has_module(name):
        raise unknown_model(name)
    return name


def unknown_model(name: str) -> UsageError:
    """Returns the error for a name that is no model."""
    return UsageError(
        f"There is no model {name!r}.{messages.did_you_mean(name, BUNDLED)} Use a bundled name "
        f"({', '.join(BUNDLED)}), an importable module, or the path of a .py file."
    )


def _has_module(name: str) -> bool:
    """Returns whether the top level of a module's name can be imported."""
    top = name.partition(".")[0]
    try:
        return top in sys.modules or importlib.util.find_spec(top) is not None
    except (ValueError, ImportError):
        return False
