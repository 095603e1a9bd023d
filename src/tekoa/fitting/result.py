"""What `fit` returns."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tekoa.bridges import any_model
from tekoa.core import objective
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.extensions import checkpoint_files
from tekoa.fitting import explain, metric_names
from tekoa.fitting.checks import Checks
from tekoa.fitting.data import forms
from tekoa.fitting.data.dataset import Dataset, Names, check_images, check_rank
from tekoa.fitting.history import History
from tekoa.loop.predict import predictions
from tekoa.loop.train import TrainLoop


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FitResult:
    """A trained model and how it was trained.

    Attributes:
        loop: The loop that trained it; iterate over `loop.until(n)` to train further.
        original: The model that was passed to `fit`.
        history: The metrics of every checkpoint.
        checks: The loss, the metrics and the validation data.
        data: The form of the training data.
        directory: The directory of the run, or None.
        is_complete: Whether training has reached its end; False after Ctrl-C.
    """

    loop: TrainLoop
    original: Any
    history: History
    checks: Checks
    data: Dataset
    directory: pathlib.Path | None
    is_complete: bool

    def __repr__(self) -> str:
        state = "" if self.is_complete else ", stopped before the end"
        where = "" if self.directory is None else f", in {str(self.directory)!r}"
        return f"<FitResult step {self.loop.step}{state}{where}>"

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.loop.step

    @property
    def state(self) -> TrainState:
        """The complete state of training."""
        return self.loop.state

    @property
    def params(self) -> PyTree:
        """The parameters to use for inference: the moving average if there is one."""
        return self.state.eval_params

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes, if targets are text or folders: class i is `classes[i]`."""
        return self.data.classes

    @property
    def model(self) -> Any:
        """The trained model, of the library that it came from.

        An NNX or Equinox module with the trained weights; for Linen, a bound module that can be
        called; for other models, the parameters.
        """
        state = self.state
        variables = objective.merge_carry(state.variables, state.carry)
        return any_model.as_object(self.original, self.loop.model_fns, state.eval_params, variables)

    def evaluate(self, data: Any = None, metrics: Any = None) -> dict[str, float]:
        """Measures the metrics on some data.

        Args:
            data: As for `fit`; the validation data by default. The metrics of several data sets
                have names such as "clean/loss".
            metrics: As for `fit`; those of `fit`, with the loss, by default.

        Raises:
            ValueError: If there is neither data nor validation data, or no metric.
        """
        functions = self.checks.metrics
        if metrics is not None:
            functions = metric_names.find_metrics(metrics, self.checks.loss)
        dataset, sets = self.data, self.checks.sets
        if data is not None:
            dataset = self._dataset(data, self.data.targets)
            if self.data.has_targets and dataset.is_pair and not dataset.has_targets:
                raise ValueError("The metrics need targets: pass evaluate((x, y)).")
            sets = {"": dataclasses.replace(dataset, split=self.data.split_of(dataset))}
        if not sets:
            raise ValueError("There is no validation data: pass evaluate(data).")
        with explain.compared_shapes(self.data, dataset, "This data"):
            return {
                "/".join(filter(None, (name, metric))): value
                for name, part in sets.items()
                for metric, value in self._measure(functions, part).items()
            }

    def _measure(self, metrics: Mapping[str, Any], data: Dataset) -> dict[str, float]:
        batches = data.eval_batches(self.checks.batch_size)
        evaluate = self.loop.evaluation(metrics, batches, split=data.split)
        return dict(evaluate(self.loop.checkpoint()).metrics["eval"])

    def predict(self, data: Any) -> Any:
        """Returns the outputs of the model for every row, as numpy arrays.

        Args:
            data: Inputs in any form that `fit` accepts; targets are not needed.
        """
        dataset = self._dataset(data, None).only_inputs()
        outputs = predictions(
            self.loop.model_fns,
            self.state,
            dataset.eval_batches(self.checks.batch_size),
            split=dataset.split,
            layout=self.loop.layout,
        )
        with explain.compared_shapes(self.data, dataset, "This data"):
            parts = [jax.device_get(part) for part in outputs]
        return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)

    def _dataset(self, data: Any, targets: Names | None) -> Dataset:
        if self.data.is_pair and forms.is_frame(data):
            data = forms.matrix_of(data)
        is_named = self.data.inputs is not None and not forms.is_arrays(data)
        if not is_named:
            dataset = forms.as_dataset(data, classes=self.data.classes)
            check_rank(self.data, dataset)
            return dataset
        dataset = forms.as_dataset(
            data, inputs=self.data.inputs, targets=targets, classes=self.data.classes
        )
        check_images(self.data, dataset)
        return dataset

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the state as a checkpoint, for `tekoa.load` or to resume from."""
        writer = checkpoint_files.CheckpointFileWriter(directory)
        writer(self.loop.checkpoint())
        writer.close()

    def page(self, out: str | os.PathLike[str] | None = None) -> pathlib.Path:
        """Writes the run as one HTML page and returns its path.

        Args:
            out: The file; NAME.html in the working directory by default.

        Raises:
            ValueError: If `fit` had no directory.
        """
        from tekoa.estimator.report import page

        if self.directory is None:
            raise ValueError("The page shows the files of a run: pass directory= to fit.")
        return page.write_page(self.directory, None if out is None else str(out))
