"""EvalLoop: a function from a checkpoint to the same checkpoint with metrics."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tekoa.bridges import detect
from tekoa.core import batch as batches
from tekoa.core import metrics, objective
from tekoa.core import step as steps
from tekoa.core.model import ModelFns
from tekoa.core.sharding import Layout
from tekoa.loop import feed
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary
from tekoa.loop.placement import Placement, choose_layout
from tekoa.loop.task import EvalTask, StopFlag


class EvalLoop:
    """Measures a checkpoint on a dataset; a stage for `serial`.

    A smaller last batch counts by its size. A dataset that can be read again is read from
    its start at every call. The moving average of the parameters is used where there is one.
    """

    def __init__(
        self,
        task: EvalTask,
        *,
        init: Any = None,
        n_steps: int | None = None,
        label: str = "eval",
        use_average: bool = True,
        rnkey: jax.Array | None = None,
        collections: Mapping[str, Sequence[str]] | None = None,
        devices: Sequence[Any] | None = None,
        layout: Layout | None = None,
        stop_flag: StopFlag | None = None,
    ):
        """Prepares the evaluation; nothing is run yet.

        Args:
            task: Model function, metrics and data.
            init: The model, as `TrainLoop` takes it, where the task has no `apply`.
            n_steps: Batches per evaluation; None: all of the data.
            label: The group of the metrics.
            use_average: If false, the parameters are used even where there is an average.
            rnkey: For models that draw numbers also when evaluated.
            collections: For Linen: rng streams at "apply".
            devices: Devices among which the rows of a batch are split.
            layout: The mesh to evaluate on, as for `TrainLoop`.
            stop_flag: Polled at every batch; once set, the evaluation is given up.

        Raises:
            ValueError: If there is nothing to measure.
        """
        if not task.metrics:
            raise ValueError("EvalTask needs at least one metric: metrics={'loss': fn}.")
        self._task, self._n_steps, self._label = task, n_steps, label
        self._use_average, self._stop_flag = use_average, stop_flag
        self._rng = jax.random.key(0) if rnkey is None else rnkey
        self._fns = _model(task, init, collections)
        self._place = Placement(choose_layout(layout, devices))
        self._zeros = self._place.whole(metrics.zeros(task.metrics))
        self._start: Any = None
        self._has_checked = False
        self._step = jax.jit(self._place.traced(self._make_step()))
        self._first_carry = jax.jit(self._make_first_carry())

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Gives the checkpoint with this evaluation's metrics added.

        Raises:
            ValueError: If the data yields no batch.
            InterruptedError: If a stop was asked for before the end.
        """
        state = checkpoint.state
        params = state.eval_params if self._use_average else state.params
        variables = dict(state.variables)
        sums = self._zeros
        i = -1
        for i, batch in enumerate(itertools.islice(self._from_start(), self._n_steps)):
            if self._stop_flag is not None and self._stop_flag.is_set():
                raise InterruptedError(f"Evaluation of step {checkpoint.step} was interrupted.")
            placed = self._place.batch(batch)
            if i == 0:
                inputs = self._task.split(placed)[0]
                params, variables = self._place.model(self._fns, params, variables, inputs)
                if state.carry is not None:
                    carry = self._first_carry(self._rng, inputs)
                    variables = objective.with_carry(variables, carry)
            sums, variables = self._step(params, variables, placed, np.uint32(i), sums)
        if i < 0:
            raise ValueError(
                f"The data of the {self._label!r} evaluation yielded no batch. A generator can "
                "be read once: give a list, a dataset, or an endless generator with n_steps."
            )
        return as_summary(checkpoint).with_metrics(self._label, metrics.compute(sums))

    def _from_start(self) -> Iterator[Any]:
        """Iterates over the data, from its start where it has one."""
        iterator = feed.positioned(self._task.data)
        if iterator is self._task.data:
            # An iterator that can be brought back to where it was when first used.
            if self._start is None:
                self._start = feed.position(iterator)
            else:
                feed.go_to(iterator, self._start)
        for batch in iterator:
            if not self._has_checked:
                self._task.split(batch)
                batches.check_arrays(batch)
                self._has_checked = True
            yield batch

    def _make_step(self):
        step = steps.make_eval_step(self._fns, self._task.metrics, split=self._task.split)

        def run(params, variables, batch, i, sums):
            rng = jax.random.fold_in(self._rng, i)
            means, changed = step(params, variables, batch, rng)
            return metrics.merge(sums, means), changed

        return run

    def _make_first_carry(self):
        def first_carry(rng, inputs):
            _, variables = self._fns.init(rng, inputs)
            return objective.without_carry(variables)[1]

        return first_carry


def _model(task: EvalTask, init: Any, collections: Any) -> ModelFns:
    """An evaluation of a Linen model needs its `apply` alone: the method knows its module."""
    if init is None and task.apply is not None:
        owner = getattr(task.apply, "__self__", None)
        init = owner.init if owner is not None and hasattr(owner, "init") else _no_init
    if init is None:
        raise TypeError(
            "EvalLoop needs a model: EvalTask(apply=model.apply, ...), or EvalLoop(init=model)."
        )
    return detect.as_model_fns(init, task.apply, collections=collections)


def _no_init(*_: Any) -> Any:
    raise TypeError("This model has a carry: EvalLoop needs init=model to start it.")
