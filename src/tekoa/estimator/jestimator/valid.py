"""Validation in the long form: runs `valid_step` and `monitor_train` of a model file."""

import logging
import types
from collections.abc import Iterable
from typing import Any

import flax.core
import jax

from tekoa.core import batch as batches
from tekoa.core.model import cast_like
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.data import DataError
from tekoa.estimator.jestimator.train import OwnTraining
from tekoa.estimator.model_file.program import with_valid_metrics
from tekoa.hosts.signals import StopFlag
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary

_log = logging.getLogger("tekoa")


class Validation:
    """A stage that adds validation metrics to those of the training period.

    Args:
        module: The model file.
        config: What its `load_config` returned.
        frozen: The config passed to steps.
        training: The training whose metrics validation adds to.
        data: The batches; empty if there is only `monitor_train` to call.
        stop_flag: Polled at every batch.
        name: Which of `--valid_sets` the data is; "" for `--valid_pattern`, and for the call of
            `monitor_train`.
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
        name: str = "",
    ):
        self._module, self._config, self._frozen = module, config, frozen
        self._training, self._data, self._stop_flag = training, data, stop_flag
        self._name = name
        self._step = jax.jit(self._run)

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns the checkpoint with the validation metrics added.

        Raises:
            DataError: If the validation data is empty.
            InterruptedError: Once the flag is set.
        """
        summary = as_summary(checkpoint)
        state = checkpoint.state.replace(params=checkpoint.state.eval_params)
        # The checkpoint's own sums have been read and emptied.
        has_run = checkpoint.n_completed_steps > 0
        sums = self._training.gathered if has_run else self._training.empty(state.sums)
        groups = {group: dict(values) for group, values in summary.metrics.items()}
        if self._data != ():
            before = self._training.read(sums)
            sums = self._validate(state, sums)
            after = self._training.read(sums)
            new = {name: value for name, value in after.items() if value != before.get(name)}
            if self._name:
                new = {name.removeprefix("valid_"): value for name, value in new.items()}
                return with_valid_metrics(summary, self._name, new)
            groups.setdefault("train", {}).update(new)
        if hasattr(self._module, "monitor_train"):
            file_state = self._training.as_file_state(state)
            # With the full weights, also if adapters are trained.
            weights = file_state.variables()["params"]
            file_state = file_state.replace(params=weights, _frozen=None, _merge=None)
            self._module.monitor_train(self._config, file_state, sums, ScalarWriter(groups))
        for group, values in groups.items():
            summary = summary.with_metrics(group, values)
        return summary

    def _validate(self, state: TrainState, sums: PyTree) -> PyTree:
        n_rows = None
        for batch in self._data:
            if self._stop_flag is not None and self._stop_flag.is_set():
                raise InterruptedError("Validation was interrupted.")
            n_before, n_rows = n_rows, batches.n_rows(batch)
            is_short = n_before is not None and n_rows < n_before
            if is_short and not self._accepts(state, sums, batch):
                break
            sums = self._step(state, sums, batch)
        if n_rows is None:
            flag = f"the set {self._name} of --valid_sets" if self._name else "--valid_pattern"
            raise DataError(f"The data of {flag} contains no examples.")
        return jax.device_get(sums)

    def _run(self, state: TrainState, sums: PyTree, batch: Any) -> PyTree:
        file_state = self._training.as_file_state(state)
        new_sums = self._module.valid_step(self._frozen, batch, file_state, sums)
        return cast_like(sums, flax.core.unfreeze(new_sums), "metrics")

    def _accepts(self, state: TrainState, sums: PyTree, batch: Any) -> bool:
        """Whether the model accepts a batch smaller than the others; logs it if not."""
        try:
            jax.eval_shape(self._run, state, sums, batch)
        except (TypeError, ValueError) as error:
            _log.warning(
                "Skipping the last %d validation examples: the model accepts full batches only "
                "(%s).",
                batches.n_rows(batch),
                str(error).split("\n", 1)[0],
            )
            return False
        return True


class ScalarWriter:
    """The writer passed to `monitor_train`; its scalars go to TensorBoard with all others.

    Args:
        groups: Metrics by group and name; scalars are added to it.
    """

    def __init__(self, groups: dict[str, dict[str, float]]):
        self._groups = groups

    def scalar(self, tag: str, value: Any, step: Any = None) -> None:
        """Adds a scalar at the step of the checkpoint, as `GROUP/NAME` or `train/NAME`."""
        del step
        group, slash, name = tag.partition("/")
        group, name = (group, name) if slash else ("train", tag)
        self._groups.setdefault(group, {})[name] = float(value)

    add_scalar = scalar
