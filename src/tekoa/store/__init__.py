"""Checkpoints on disk: commit, verification, lease, retention, formats.

Names are loaded when they are used: listing and inspecting steps needs no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tekoa.store import errors as errors
    from tekoa.store import t5x as t5x
    from tekoa.store.best import Score as Score
    from tekoa.store.converting import convert as convert
    from tekoa.store.inspecting import inspect as inspect
    from tekoa.store.loading import load as load
    from tekoa.store.loading import open_newest as open_newest
    from tekoa.store.migrating import migrate as migrate
    from tekoa.store.pins import pinned as pinned
    from tekoa.store.restoring import Restored as Restored
    from tekoa.store.restoring import restore as restore
    from tekoa.store.retention import KeepBest as KeepBest
    from tekoa.store.retention import KeepEvery as KeepEvery
    from tekoa.store.retention import KeepLast as KeepLast
    from tekoa.store.signals import stop_flag as stop_flag
    from tekoa.store.store import Store as Store
    from tekoa.store.warmstart import warm_start as warm_start

_HOME = {
    "KeepBest": "retention",
    "KeepEvery": "retention",
    "KeepLast": "retention",
    "Restored": "restoring",
    "Score": "best",
    "Store": "store",
    "convert": "converting",
    "inspect": "inspecting",
    "load": "loading",
    "migrate": "migrating",
    "open_newest": "loading",
    "pinned": "pins",
    "restore": "restoring",
    "stop_flag": "signals",
    "warm_start": "warmstart",
}
_MODULES = ("errors", "t5x")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tekoa.store.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"tekoa.store.{_HOME[name]}"), name)
    raise AttributeError(f"tekoa.store has no attribute {name!r}.")


def __dir__() -> list[str]:
    return sorted([*_HOME, *_MODULES])
