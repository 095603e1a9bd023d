"""EvalLoop: evaluates a checkpoint and adds the metrics to it."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tekoa._aliases import accept_aliases
from tekoa.bridges import any_model
from tekoa.core import batch as batches
from tekoa.core import metrics, objective
from tekoa.core import step as steps
from tekoa.core.model import ModelFns, run_model
from tekoa.data import interop
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary
from tekoa.loop.task import EvalTask, StopRequest
from tekoa.sharding.layout import Layout
from tekoa.sharding.placement import Placement, choose_layout


class EvalLoop:
    """Evaluates checkpoints on a dataset; a stage for `serial`.

    Batches are weighted by their number of rows. A dataset that can be read again is read from its
    start at every call. The moving average of the parameters is used if there is one.
    """

    @accept_aliases(init="model", rnkey="rng")
    def __init__(
        self,
        task: EvalTask,
        *,
        model: Any = None,
        n_steps: int | None = None,
        label: str = "eval",
        use_average: bool = True,
        rng: jax.Array | None = None,
        collections: Mapping[str, Sequence[str]] | None = None,
        devices: Sequence[Any] | None = None,
        layout: Layout | None = None,
        stop_flag: StopRequest | None = None,
    ):
        """Prepares the evaluation; nothing is run yet.

        Args:
            task: Model function, metrics and data.
            model: The model, as for `TrainLoop`, if the task has no `apply`. `init=` is an alias.
            n_steps: Batches per evaluation; None for all of the data.
            label: The group under which the metrics are stored.
            use_average: Whether to use the moving average of the parameters if there is one.
            rng: Root key for models that are random in evaluation. `rnkey=` is an alias.
            collections: For Linen: rng streams at "apply".
            devices: Devices over which the rows of a batch are split.
            layout: The mesh to evaluate on, as for `TrainLoop`.
            stop_flag: Polled at every batch; once set, the evaluation is abandoned.

        Raises:
            ValueError: If the task has no metrics.
        """
        if not task.metrics and not task.gathered:
            raise ValueError("EvalTask needs at least one metric: metrics={'loss': fn}.")
        if twice := sorted(set(task.metrics) & set(task.gathered)):
            raise ValueError(f"EvalTask has {twice[0]!r} both in metrics and in gathered.")
        self._task, self._n_steps, self._label = task, n_steps, label
        self._use_average, self._stop_flag = use_average, stop_flag
        self._rng = jax.random.key(0) if rng is None else rng
        self._fns = fns = _model_fns(task, model, collections)
        self._place = Placement(choose_layout(layout, devices))
        self._zeros: Any = None
        self._start: Any = None
        self._has_checked = False
        self._means = jax.jit(self._place.traced(self._make_means()))
        self._step = jax.jit(self._add_means)
        self._rows = self._place.jit_gathered(self._make_rows())
        self._new_carry = jax.jit(functools.partial(objective.new_carry, fns))

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns the checkpoint with this evaluation's metrics added.

        Raises:
            ValueError: If the data yields no batch.
            InterruptedError: If a stop was requested before the end.
        """
        state = checkpoint.state
        params = state.eval_params if self._use_average else state.params
        variables = dict(state.variables)
        sums: Any = None
        rows: list[Any] = []
        i = -1
        for i, batch in enumerate(itertools.islice(self._from_start(), self._n_steps)):
            if self._stop_flag is not None and self._stop_flag.is_set():
                raise InterruptedError(f"Evaluation of step {checkpoint.step} was interrupted.")
            placed = self._place.batch(batch)
            if i == 0:
                inputs = self._task.split(placed)[0]
                params, variables = self._place.model(self._fns, params, variables, inputs)
                if state.carry is not None:
                    carry = self._new_carry(self._rng, inputs)
                    variables = objective.merge_carry(variables, carry)
                sums = self._no_sums(params, variables, placed)
            if self._task.gathered:
                batch_rows, _ = self._rows(params, variables, placed, np.uint32(i))
                rows.append(jax.device_get(batch_rows))
            sums, variables = self._step(params, variables, placed, np.uint32(i), sums)
        if i < 0:
            raise ValueError(
                f"The data of the {self._label!r} evaluation yielded no batch. A generator can "
                "be read only once: pass a list, a dataset, or an endless generator with n_steps."
            )
        values = metrics.compute(sums)
        values = {name: values[name] for name in self._task.metrics}  # In the user's order.
        if rows:
            all_rows = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
            values |= {name: float(fn(*all_rows)) for name, fn in self._task.gathered.items()}
        return as_summary(checkpoint).with_metrics(self._label, values)

    def _from_start(self) -> Iterator[Any]:
        """Yields batches, from the start of the data if it can be read again."""
        iterator = interop.iterate(self._task.data)
        if iterator is self._task.data:
            # An iterator that may be able to return to its first position.
            if self._start is None:
                self._start = interop.position(iterator)
            else:
                interop.go_to(iterator, self._start)
        for batch in iterator:
            if not self._has_checked:
                self._task.split(batch)
                batches.check_arrays(batch)
                self._has_checked = True
            yield batch

    def _make_means(self):
        step = steps.make_eval_step(self._fns, self._task.metrics, split=self._task.split)

        def run(params, variables, batch, i):
            return step(params, variables, batch, jax.random.fold_in(self._rng, i))

        return run

    def _make_rows(self):
        """Returns the step whose outputs and targets are gathered from all batches."""

        def run(params, variables, batch, i):
            inputs, targets = self._task.split(batch)
            rng = jax.random.fold_in(self._rng, i)
            outputs, changed = run_model(self._fns, params, variables, inputs, rng=rng, train=False)
            return (*outputs, *targets), changed

        return run

    def _add_means(self, params, variables, batch, i, sums):
        means, changed = self._means(params, variables, batch, i)
        return metrics.merge(sums, means), changed

    def _no_sums(self, params, variables, batch):
        """Returns the sums before the first batch; the metrics are traced only once."""
        if self._zeros is None:
            shapes, _ = jax.eval_shape(self._means, params, variables, batch, np.uint32(0))
            self._zeros = self._place.whole(metrics.zeros_like(shapes))
        return self._zeros


def _model_fns(task: EvalTask, model: Any, collections: Any) -> ModelFns:
    # For Linen `task.apply` is enough: the bound method knows its module.
    if model is None and task.apply is not None:
        owner = getattr(task.apply, "__self__", None)
        model = owner.init if owner is not None and hasattr(owner, "init") else _no_init
    if model is None:
        raise TypeError(
            "EvalLoop needs a model: EvalTask(apply=model.apply, ...), or EvalLoop(model=model)."
        )
    return any_model.as_model_fns(model, task.apply, collections=collections)


def _no_init(*_: Any) -> Any:
    raise TypeError("This model has a carry: pass model= to EvalLoop, to initialise the carry.")
