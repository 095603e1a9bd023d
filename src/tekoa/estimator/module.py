"""What a model file provides, in its short form: one function that returns one record."""

import dataclasses
import difflib
import importlib
import importlib.util
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import optax

from tekoa.data import Info
from tekoa.estimator.config import UsageError

BUNDLED = ("linear_regression", "mnist", "lstm_lm", "transformer_lm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A model and all that belongs to it.

    Attributes:
        model: A Linen, NNX or Equinox module, or `ModelFns`.
        loss: `loss(outputs, batch)`, as `make_train_step` takes it.
        optimizer: Any optax transformation, or a function that makes it: what is costly to make
            is then made for training only.
        inputs: What of a batch goes to the model.
        metrics: Name to `fn(outputs, batch)`: a mean, one number per row, or a `Mean`.
        predict: `fn(outputs)` -> one result per row, for predictions.
        finish: Adds what is computed of the metrics over all batches, such as perplexity.
    """

    model: Any
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation | Callable[[], optax.GradientTransformation]
    inputs: Callable[[Any], Any]
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    predict: Callable[[Any], Any] | None = None
    finish: Callable[[dict[str, float]], dict[str, float]] | None = None

    def make_optimizer(self) -> optax.GradientTransformation:
        """Gives the optimizer, made now if it was left for later."""
        return self.optimizer() if callable(self.optimizer) else self.optimizer

    def finished(self, found: Mapping[str, float]) -> dict[str, float]:
        """Metrics with what is computed of them."""
        return dict(found) if self.finish is None else self.finish(dict(found))

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Tells the inputs of a batch from its targets: the batch itself."""
        inputs = self.inputs(batch)
        return inputs if isinstance(inputs, tuple) else (inputs,), (batch,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a model may want to know of its data.

    Attributes:
        info: Shapes, dtypes, number of classes, value range.
        n_examples: Number of examples; None if not known.
        batch_size: Rows of a training batch.
        sample: One batch.
    """

    info: Info
    n_examples: int | None
    batch_size: int
    sample: Any


def load_module(name: str | None) -> types.ModuleType:
    """Imports a model: a bundled name, a module's name or the path of a .py file.

    Raises:
        UsageError: If there is none.
    """
    if not name:
        raise UsageError(
            "Which model? Name one: `tekoa train mnist`, or --module_imp=my.module. "
            "`tekoa models` lists what is bundled."
        )
    if name in BUNDLED:
        return importlib.import_module(f"tekoa.models.{name}")
    if name.endswith(".py"):
        return _from_file(pathlib.Path(name))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        close = difflib.get_close_matches(name, BUNDLED, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UsageError(
            f"There is no model {name!r}.{hint} Give a bundled name ({', '.join(BUNDLED)}), a "
            "module that can be imported, or the path of a .py file."
        ) from None


def _from_file(path: pathlib.Path) -> types.ModuleType:
    if not path.is_file():
        raise UsageError(f"There is no model file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(path)!r} cannot be imported as a model.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
