"""Validation in the long form: the model file's `valid_step`, and `monitor_train`."""

import logging
import types
from collections.abc import Iterable
from typing import Any

import flax.core
import jax

from tekoa.core import batch as batches
from tekoa.core.model import keep_form
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.data import DataError
from tekoa.estimator.long_train import OwnTraining
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary
from tekoa.loop.task import StopFlag

_log = logging.getLogger("tekoa")


class Validation:
    """A stage that adds the metrics of a validation to those of the training period.

    Args:
        module: The model file.
        config: What its `load_config` gave.
        frozen: The config that steps are given.
        training: Whose metrics go on.
        data: The batches; none where there is only `monitor_train` to call.
        stop_flag: Polled at every batch.
    """

    def __init__(
        self,
        module: types.ModuleType,
        config: Any,
        frozen: Any,
        *,
        training: OwnTraining,
        data: Iterable[Any],
        stop_flag: StopFlag | None,
    ):
        self._module, self._config, self._frozen = module, config, frozen
        self._training, self._data, self._stop_flag = training, data, stop_flag
        self._step = jax.jit(self._run)

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Gives the checkpoint with this validation's metrics added.

        Raises:
            DataError: If there is data to validate on and it has no example.
            InterruptedError: Once the flag is set.
        """
        summary = as_summary(checkpoint)
        state = checkpoint.state.replace(params=checkpoint.state.eval_params)
        # The period's own metrics have been read, and emptied in the checkpoint.
        has_run = checkpoint.n_completed_steps > 0
        gathered = self._training.gathered if has_run else self._training.empty(state.sums)
        groups = {group: dict(values) for group, values in summary.metrics.items()}
        if self._data != ():
            before = self._training.read(gathered)
            gathered = self._validated(state, gathered)
            found = self._training.read(gathered)
            new = {name: value for name, value in found.items() if value != before.get(name)}
            groups.setdefault("train", {}).update(new)
        if hasattr(self._module, "monitor_train"):
            writer = Points(groups)
            given = self._training.as_file_state(state)
            self._module.monitor_train(self._config, given, gathered, writer)
        for group, values in groups.items():
            summary = summary.with_metrics(group, values)
        return summary

    def _validated(self, state: TrainState, gathered: PyTree) -> PyTree:
        n_rows = None
        for batch in self._data:
            if self._stop_flag is not None and self._stop_flag.is_set():
                raise InterruptedError("Validation was interrupted.")
            n_first, n_rows = n_rows, batches.n_rows(batch)
            if n_first is not None and n_rows < n_first and not self._takes(state, gathered, batch):
                break
            gathered = self._step(state, gathered, batch)
        if n_rows is None:
            raise DataError("The data of --valid_pattern has no example.")
        return jax.device_get(gathered)

    def _run(self, state: TrainState, gathered: PyTree, batch: Any) -> PyTree:
        given = self._training.as_file_state(state)
        made = self._module.valid_step(self._frozen, batch, given, gathered)
        return keep_form(gathered, flax.core.unfreeze(made), "metrics")

    def _takes(self, state: TrainState, gathered: PyTree, batch: Any) -> bool:
        """Whether a smaller batch fits a model that took full ones; says so if it does not."""
        try:
            jax.eval_shape(self._run, state, gathered, batch)
        except (TypeError, ValueError) as error:
            _log.warning(
                "The last %d examples of the validation are left out: the model takes full "
                "batches only (%s).",
                batches.n_rows(batch),
                str(error).split("\n", 1)[0],
            )
            return False
        return True


class Points:
    """What `monitor_train` writes to: points that go to TensorBoard with all others.

    Args:
        groups: Metrics by group and name, which the points are added to.
    """

    def __init__(self, groups: dict[str, dict[str, float]]):
        self._groups = groups

    def scalar(self, tag: str, value: Any, step: Any = None) -> None:
        """Adds a point at the step of the checkpoint, under `GROUP/NAME` or `train/NAME`."""
        del step
        group, slash, name = tag.partition("/")
        group, name = (group, name) if slash else ("train", tag)
        self._groups.setdefault(group, {})[name] = float(value)

    add_scalar = scalar
