"""Bundled models, one file each."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tekoa.models.rnn_lm import RNNLM as RNNLM

_HOME = {"RNNLM": "rnn_lm"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"tekoa.models.{_HOME[name]}"), name)
    raise AttributeError(f"tekoa.models has no attribute {name!r}.")
