"""One command around a model file, and what such a file is made of.

The names below are those that model files use. Each is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tekoa.estimator.evaluator import Evaluator as Evaluator
    from tekoa.estimator.metrics import MeanMetrics as MeanMetrics
    from tekoa.estimator.module import DataFacts as DataFacts
    from tekoa.estimator.module import Experiment as Experiment
    from tekoa.estimator.predictor import Predictor as Predictor
    from tekoa.estimator.states import InferState as InferState
    from tekoa.estimator.states import TrainState as TrainState

_HOMES = {
    "evaluator": ["Evaluator"],
    "metrics": ["MeanMetrics"],
    "module": ["DataFacts", "Experiment"],
    "predictor": ["Predictor"],
    "states": ["InferState", "TrainState"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"tekoa.estimator has no attribute {name!r}.")
    return getattr(importlib.import_module(f"tekoa.estimator.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
