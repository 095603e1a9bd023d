"""The short form of a model file: one function, `experiment`, that returns an `Experiment`."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optax

from tekoa.core import files
from tekoa.core.loss.reduction import Reduction
from tekoa.data import Info
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file import names
from tekoa.extensions.generation.samples import TextFns
from tekoa.optim import named

# The part of a path that marks the code of installed packages.
_PACKAGES = {"site-packages", "dist-packages"}
# Marks modules that were model files, which a later one of the same name replaces.
_MODEL_FILE = "__tekoa_model_file__"
_OWN_FILES = (__file__, importlib.__file__)
# Packages that model files import, and the extras of Tekoa that install them.
_EXTRAS = {
    "PIL": "images",
    "datasets": "datasets",
    "equinox": "equinox",
    "grain": "records",
    "haiku": "haiku",
    "tensorflow_datasets": "tfds",
    "tokenizers": "tokenizers",
}
_JESTIMATOR_PACKAGES = ("jestimator", "flaxformer", "t5x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A model with its loss, optimizer and metrics.

    Attributes:
        model: A Linen, NNX or Equinox module, or `ModelFns`.
        loss: `loss(outputs, batch)`, as for `make_train_step`.
        optimizer: An optax transformation, the name of one as in `TrainTask`, such as "auto",
            or a function that creates it. Use a function if creating it is expensive: it is
            called for training only.
        inputs: `inputs(batch)` returns the inputs of the model.
        metrics: Name to `fn(outputs, batch)`, which returns a mean, one number per row, or a
            `Mean`.
        predict: `fn(outputs)` returns one result per row, for predictions.
        finish: Adds metrics computed from those over all batches, such as perplexity.
        trainable: Which parameters to train, as in `TrainTask`; None for all.
        reduction: Whether the loss is a "mean" or a "sum" over rows, as in `TrainTask`.
        text: How a language model reads and writes text, for `--sample_every`.
    """

    model: Any
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation | str | Callable[[], optax.GradientTransformation]
    inputs: Callable[[Any], Any]
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    predict: Callable[[Any], Any] | None = None
    finish: Callable[[dict[str, float]], dict[str, float]] | None = None
    trainable: Any = None
    reduction: Reduction = "auto"
    text: TextFns | None = None

    def make_optimizer(self) -> optax.GradientTransformation:
        """Returns the optimizer, calling the function that creates it if there is one."""
        optimizer = self.optimizer() if callable(self.optimizer) else self.optimizer
        return named.as_optimizer(optimizer)

    def finish_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics with those that `finish` adds."""
        return dict(metrics) if self.finish is None else self.finish(dict(metrics))

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Splits a batch into model inputs and loss targets (the batch itself)."""
        inputs = self.inputs(batch)
        return inputs if isinstance(inputs, tuple) else (inputs,), (batch,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a model can learn about its data.

    Attributes:
        info: Shapes, dtypes, number of classes, value range.
        n_examples: Number of examples; None for a stream, whose end is not known.
        batch_size: Rows in a training batch.
        sample: One batch.
        count: Counts the examples of a stream, for `n_batches`.
    """

    info: Info
    n_examples: int | None
    batch_size: int
    sample: Any
    count: Callable[[], int] | None = None

    @functools.cached_property
    def n_batches(self) -> float:
        """Training batches in the data; at least 1. Reads a stream to its end."""
        n_examples = self.n_examples
        if n_examples is None and self.count is not None:
            n_examples = self.count()
        return max(1.0, (n_examples or 1) / self.batch_size)


def load_module(name: str | None) -> types.ModuleType:
    """Imports a model: a bundled name, a module name or the path of a .py file.

    Raises:
        UsageError: If no such model exists, or its import fails; then it names file and line.
    """
    name = names.check_model(name)
    if name in names.BUNDLED:
        return importlib.import_module(f"tekoa.models.{name}")
    path = files.local_path(name)
    try:
        return _import_file(path) if name.endswith(".py") else _import(name)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"The model {name!r} cannot be imported. {_explain(error)}") from error


def _import(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise names.unknown_model(name) from None


def _import_file(path: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(path)!r} cannot be imported as a model.")
    module = importlib.util.module_from_spec(spec)
    with beside(path):
        spec.loader.exec_module(module)
    # Data workers import its functions by name.
    other = sys.modules.get(module.__name__)
    if other is None or hasattr(other, _MODEL_FILE):
        setattr(module, _MODEL_FILE, True)
        sys.modules[module.__name__] = module
    return module


@contextlib.contextmanager
def beside(path: str | pathlib.Path | None) -> Iterator[None]:
    """Makes the files beside a model file importable, as those beside a script are."""
    directory = None if path is None else str(pathlib.Path(path).absolute().parent)
    if directory is None or directory in sys.path:
        yield
        return
    sys.path.append(directory)  # Last, so that they hide no package.
    try:
        yield
    finally:
        sys.path.remove(directory)


def _explain(error: Exception) -> str:
    """Returns where an import failed, why, and what to install."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}."
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and frame.filename not in _OWN_FILES
    ]
    # The last line of the user's own code: packages may fail deep inside.
    own = [frame for frame in frames if not _PACKAGES & {*pathlib.Path(frame.filename).parts}]
    frame = (own or frames)[-1]
    where = f"{frame.filename}, line {frame.lineno}"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return f"{where}: {type(error).__name__}: {error}"
    package = error.name.partition(".")[0]
    hint = f"Install {package!r}."
    if package in _EXTRAS:
        hint = f"Install it with: pip install 'tekoa[{_EXTRAS[package]}]'"
    if package in _JESTIMATOR_PACKAGES:
        hint = "Set --compat=jestimator to run model files of JEstimator."
    return f"{where}: {error}. {hint}"
