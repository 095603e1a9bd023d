"""Checkpoints on disk: commit, verification, lease, retention, formats.

Names are loaded when they are used: listing and inspecting steps needs no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tekoa.store.loading import load as load
    from tekoa.store.restoring import Restored as Restored
    from tekoa.store.restoring import restore as restore
    from tekoa.store.retention import KeepBest as KeepBest
    from tekoa.store.retention import KeepEvery as KeepEvery
    from tekoa.store.retention import KeepLast as KeepLast
    from tekoa.store.store import Store as Store

_HOME = {
    "KeepBest": "retention",
    "KeepEvery": "retention",
    "KeepLast": "retention",
    "Restored": "restoring",
    "Store": "store",
    "load": "loading",
    "restore": "restoring",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"tekoa.store.{_HOME[name]}"), name)
    raise AttributeError(f"tekoa.store has no attribute {name!r}.")
