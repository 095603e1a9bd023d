"""Tekoa: training on JAX, from a pure step to one command.

The public names are those below. Each is loaded when it is first used, so that
`import tekoa` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tekoa import combinator as combinator
    from tekoa import data as data
    from tekoa import models as models
    from tekoa import optim as optim
    from tekoa import random as random
    from tekoa import store as store
    from tekoa import testing as testing
    from tekoa.bridges.detect import as_model_fns as as_model_fns
    from tekoa.bridges.lora import lora as lora
    from tekoa.core.guard import NonFiniteError as NonFiniteError
    from tekoa.core.metrics import Mean as Mean
    from tekoa.core.model import ModelFns as ModelFns
    from tekoa.core.sharding import Layout as Layout
    from tekoa.core.sharding import constrain as constrain
    from tekoa.core.sharding_mesh import make_mesh as make_mesh
    from tekoa.core.state import StepOutput as StepOutput
    from tekoa.core.state import TrainState as TrainState
    from tekoa.core.step import init_state as init_state
    from tekoa.core.step import make_eval_step as make_eval_step
    from tekoa.core.step import make_predict_step as make_predict_step
    from tekoa.core.step import make_train_step as make_train_step
    from tekoa.core.step import moving_average as moving_average
    from tekoa.extensions.base import serial as serial
    from tekoa.extensions.base import when as when
    from tekoa.extensions.best import BestFileWriter as BestFileWriter
    from tekoa.extensions.best import HighestCheckpointFileReader as HighestCheckpointFileReader
    from tekoa.extensions.best import HighestCheckpointFileWriter as HighestCheckpointFileWriter
    from tekoa.extensions.best import LowestCheckpointFileReader as LowestCheckpointFileReader
    from tekoa.extensions.best import LowestCheckpointFileWriter as LowestCheckpointFileWriter
    from tekoa.extensions.early_stop import EarlyStopping as EarlyStopping
    from tekoa.extensions.files import CheckpointFileReader as CheckpointFileReader
    from tekoa.extensions.files import CheckpointFileWriter as CheckpointFileWriter
    from tekoa.extensions.logger import SummaryLogger as SummaryLogger
    from tekoa.extensions.profiler import ProfilerTrace as ProfilerTrace
    from tekoa.extensions.progress import ProgressBar as ProgressBar
    from tekoa.extensions.tensorboard import SummaryWriter as SummaryWriter
    from tekoa.loop.checkpoint import Checkpoint as Checkpoint
    from tekoa.loop.checkpoint import Summary as Summary
    from tekoa.loop.evaluate import EvalLoop as EvalLoop
    from tekoa.loop.task import EvalTask as EvalTask
    from tekoa.loop.task import TrainTask as TrainTask
    from tekoa.loop.train import TrainLoop as TrainLoop
    from tekoa.loop.triggers import AtSteps as AtSteps
    from tekoa.loop.triggers import EverySeconds as EverySeconds
    from tekoa.loop.triggers import EverySteps as EverySteps
    from tekoa.optim.amos import amos as amos
    from tekoa.optim.groups import groups as groups
    from tekoa.optim.groups import mask as mask
    from tekoa.optim.rates import current_rates as current_rates
    from tekoa.optim.rates import rated as rated
    from tekoa.optim.scale import amos_for as amos_for
    from tekoa.optim.scale import scales as scales
    from tekoa.store.loading import load as load_checkpoint  # noqa: F401

__version__ = "0.1.0"

# Module to its public names; the architecture test holds it to the imports above.
_MODULES = ("combinator", "data", "models", "optim", "random", "store", "testing")
_HOMES = {
    "bridges.detect": ["as_model_fns"],
    "bridges.lora": ["lora"],
    "core.guard": ["NonFiniteError"],
    "core.metrics": ["Mean"],
    "core.model": ["ModelFns"],
    "core.sharding": ["Layout", "constrain"],
    "core.sharding_mesh": ["make_mesh"],
    "core.state": ["StepOutput", "TrainState"],
    "core.step": [
        "init_state",
        "make_eval_step",
        "make_predict_step",
        "make_train_step",
        "moving_average",
    ],
    "extensions.base": ["serial", "when"],
    "extensions.best": [
        "BestFileWriter",
        "HighestCheckpointFileReader",
        "HighestCheckpointFileWriter",
        "LowestCheckpointFileReader",
        "LowestCheckpointFileWriter",
    ],
    "extensions.early_stop": ["EarlyStopping"],
    "extensions.files": ["CheckpointFileReader", "CheckpointFileWriter"],
    "extensions.logger": ["SummaryLogger"],
    "extensions.profiler": ["ProfilerTrace"],
    "extensions.progress": ["ProgressBar"],
    "extensions.tensorboard": ["SummaryWriter"],
    "loop.checkpoint": ["Checkpoint", "Summary"],
    "loop.evaluate": ["EvalLoop"],
    "loop.task": ["EvalTask", "TrainTask"],
    "loop.train": ["TrainLoop"],
    "loop.triggers": ["AtSteps", "EverySeconds", "EverySteps"],
    "optim.amos": ["amos"],
    "optim.groups": ["groups", "mask"],
    "optim.rates": ["current_rates", "rated"],
    "optim.scale": ["amos_for", "scales"],
    "store.loading": ["load_checkpoint"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_RENAMED = {"load_checkpoint": "load"}

__all__ = [*_MODULES, *_HOME_OF]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tekoa.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"tekoa has no attribute {name!r}.")
    home = importlib.import_module(f"tekoa.{_HOME_OF[name]}")
    return getattr(home, _RENAMED.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)
