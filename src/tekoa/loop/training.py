"""What a loop runs: the state to start from, the step, and the metrics it gathers.

A `TrainTask` says it by a model, a loss and an optimizer. A task may also bring a step of
its own, by being a `Training` itself.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import optax

from tekoa.core import guard, metrics, objective, sequence, trees
from tekoa.core import step as steps
from tekoa.core.model import ModelFns
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.loop.task import TrainTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a step is made; see `make_train_step`."""

    accumulate: int = 1
    ema: float | None = None
    precision: objective.Precision = "float32"
    on_nan: guard.OnNan = "stop"


class Training(Protocol):
    """What a loop runs."""

    @property
    def data(self) -> Iterable[Any]:
        """The batches."""
        ...

    @property
    def tells(self) -> Sequence[str]:
        """Which numbers of a `StepOutput` mean something, where they are not None."""
        ...

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Tells the inputs of a batch from its targets; raises if it is no batch."""
        ...

    def axes(self, rng: jax.Array, batch: Any) -> Mapping[trees.Name, tuple[Any, ...]]:
        """Logical axes of the model's arrays, by collection and name."""
        ...

    def init(self, rng: jax.Array, batch: Any, options: Options) -> TrainState:
        """Makes the state before the first step; may be traced."""
        ...

    def make_step(self, options: Options, *, keep_grads: bool = False) -> steps.Step:
        """Makes `step(state, batch) -> (state, StepOutput)`, pure, which counts itself."""
        ...

    def make_steps(self, options: Options) -> steps.Step:
        """Makes the same for several batches, stacked along a new first axis."""
        ...

    def empty(self, sums: PyTree) -> PyTree:
        """Gives the state's metrics before anything is gathered, as arrays of their own."""
        ...

    def compute(self, sums: PyTree) -> dict[str, float]:
        """Reads the metrics gathered since they were last emptied."""
        ...


class ModelTraining:
    """The training of a `TrainTask`.

    Args:
        fns: The model.
        task: Optimizer, loss and data.
        input_sample: Inputs to initialise with; those of the first batch by default.
    """

    tells: Sequence[str] = ("loss", "gradients_l2norm", "weights_l2norm")

    def __init__(self, fns: ModelFns, task: TrainTask, input_sample: Any = None):
        self._fns, self._task, self._input_sample = fns, task, input_sample
        self.data = task.data

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """As the task does."""
        return self._task.split(batch)

    def axes(self, rng: jax.Array, batch: Any) -> Mapping[trees.Name, tuple[Any, ...]]:
        """Those that the model names."""
        if self._fns.axes is None:
            return {}
        return self._fns.axes(rng, jax.eval_shape(self._inputs, batch))

    def init(self, rng: jax.Array, batch: Any, options: Options) -> TrainState:
        """Makes the state of a new model, with metrics as the loss names them."""
        task = self._task
        inputs = self._inputs(batch)
        state = steps.init_state(self._fns, task.optimizer, rng, inputs=inputs, ema=options.ema)
        loss_of = objective.make_objective(self._fns, task.loss, split=task.split)
        given = objective.with_carry(state.variables, state.carry)
        _, (_, _, found) = jax.eval_shape(loss_of, state.params, given, batch, state.rng)
        return state.replace(sums=metrics.zeros(found))

    def make_step(self, options: Options, *, keep_grads: bool = False) -> steps.Step:
        """Makes the one training step."""
        return steps.make_train_step(*self._given, keep_grads=keep_grads, **self._named(options))

    def make_steps(self, options: Options) -> steps.Step:
        """Makes several training steps in one."""
        return sequence.make_train_steps(*self._given, **self._named(options))

    def empty(self, sums: PyTree) -> PyTree:
        """Makes empty means of the same names."""
        return metrics.zeros(sums)

    def compute(self, sums: PyTree) -> dict[str, float]:
        """Reads the means."""
        return metrics.compute(sums)

    @property
    def _given(self) -> tuple[ModelFns, objective.Loss | None, optax.GradientTransformation]:
        return self._fns, self._task.loss, self._task.optimizer

    def _named(self, options: Options) -> dict[str, Any]:
        return {**dataclasses.asdict(options), "split": self._task.split}

    def _inputs(self, batch: Any) -> tuple[Any, ...]:
        given = self._input_sample
        if given is None:
            return self._task.split(batch)[0]
        return given if isinstance(given, tuple) else (given,)
