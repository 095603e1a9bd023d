"""TrainLoop: runs the pure step and yields checkpoints; the user's code drives it.

`step` is the number of completed optimizer steps. Checkpoints fall on multiples of
`n_steps_per_checkpoint` and on the last step.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tekoa._aliases import accept_aliases
from tekoa.core import nonfinite, objective
from tekoa.core.model import ModelFns, merge_untrained
from tekoa.core.state import TrainState
from tekoa.core.step import Step
from tekoa.loop import initial_state, train_metrics
from tekoa.loop.checkpoint import Summary
from tekoa.loop.engine import runner
from tekoa.loop.engine.dispatch import StepsPerDispatch
from tekoa.loop.engine.flat_state import StateCodec
from tekoa.loop.engine.programs import KeepGrads, make_programs
from tekoa.loop.evaluate import EvalLoop
from tekoa.loop.feed import BatchFeed
from tekoa.loop.own_step import StepTraining
from tekoa.loop.task import (
    ChoosesOptimizer,
    EvalTask,
    Options,
    Restored,
    StateReader,
    StopRequest,
    Training,
    TrainTask,
    check_count,
)
from tekoa.sharding import placement
from tekoa.sharding.layout import Layout
from tekoa.sharding.specs import Rules

_log = logging.getLogger("tekoa")


class TrainLoop:
    """Trains a model, and yields a checkpoint every few steps.

    Args:
        model: A Linen module or its `init`, an NNX or Equinox module, plain functions, `ModelFns`,
            a reader of checkpoints around one of these, or None for a task with its own step.
            `init=` is an alias.
        task: Model function, optimizer, loss and data; or a `Training`, which has its own step.
        n_steps_per_checkpoint: Checkpoints fall on its multiples and on the last step.
        n_steps: Total number of steps; None to train until the data ends.
        rng: Root key of all randomness; `jax.random.key(0)` by default. `rnkey=` is an alias.
        collections: For Linen: rng streams at "init" and at "apply".
        mutable_collections: For Linen: which collections training may change: all, none, a name,
            several names, or a `flax.core.DenyList`.
        input_sample: Inputs for initialisation; those of the first batch by default.
        devices: Devices over which the rows of a batch are split; each holds all parameters.
        layout: How parameters, optimizer state and batches are split over a mesh.
        optimizer_rules: How the optimizer state is split, as in `Layout`.
        stdout: Whether the loop's messages are printed: all (True), none (False), or only those on
            where training starts and why it ends early (None). All of them are logged.
        accumulate: As for `make_train_step`.
        ema: As for `make_train_step`.
        precision: As for `make_train_step`.
        on_nan: As for `make_train_step`; "stop" raises `NonFiniteError`.
        grads: Whether checkpoints hold the gradients of their step; compiles a second program.
            "norms" adds metrics instead: norms of every parameter, its gradient and its update.
        steps_per_dispatch: Steps that are sent to the device at once. "auto" measures once, at the
            first checkpoint after a thousand steps.
        stop_flag: Polled at every dispatch; once set, the loop ends with a checkpoint.

    Raises:
        TypeError: If the model, the data or the loss does not have the required form.
        ValueError: If a number is out of range or the data is empty.
    """

    @accept_aliases(init="model", rnkey="rng")
    def __init__(
        self,
        model: Any,
        task: TrainTask | Training,
        *,
        n_steps_per_checkpoint: int = 100,
        n_steps: int | None = None,
        rng: jax.Array | None = None,
        collections: Mapping[str, Sequence[str]] | None = None,
        mutable_collections: Any = True,
        input_sample: Any = None,
        devices: Sequence[Any] | None = None,
        layout: Layout | None = None,
        optimizer_rules: Rules | str | None = None,
        stdout: bool | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        precision: objective.Precision = "float32",
        on_nan: nonfinite.OnNan = "stop",
        grads: KeepGrads = False,
        steps_per_dispatch: StepsPerDispatch = "auto",
        stop_flag: StopRequest | None = None,
    ):
        began = time.perf_counter()
        self.n_steps, self.n_steps_per_checkpoint = n_steps, n_steps_per_checkpoint
        self._stdout, self._is_stopped, self._resumed_from = stdout, False, ""
        self._training, self._fns = initial_state.as_training(
            task, model, input_sample, collections=collections, mutable=mutable_collections
        )
        self._feed = BatchFeed(self._training.data, self._training.split, self._report)
        first_batch = self._feed.peek()
        self._chooser = self._training if isinstance(self._training, ChoosesOptimizer) else None
        if self._chooser:
            self._chooser.resolve_optimizer(first_batch, self.n_steps)
        self._place = placement.Placement(placement.choose_layout(layout, devices, optimizer_rules))
        options = Options(accumulate=accumulate, ema=ema, precision=precision, on_nan=on_nan)
        state, restored, load_seconds = initial_state.init_or_restore(
            self._training,
            jax.random.key(0) if rng is None else rng,
            batch=first_batch,
            place=self._place,
            options=options,
            reader=model if isinstance(model, StateReader) else None,
        )
        if restored is not None:
            self._resume(state, restored)
        self._report_optimizer(int(state.step))
        steps_per_dispatch = initial_state.resolve_steps_per_dispatch(
            steps_per_dispatch, restored, self._place
        )
        self._runner = self._make_runner(
            state, options=options, steps_per_dispatch=steps_per_dispatch, keep_grads=grads
        )
        self.stop_flag, self.options = stop_flag, options
        self._grads: KeepGrads = grads
        self._setup = {
            **initial_state.setup_facts(self._training, state, first_batch),
            "load_seconds": load_seconds,
            "init_seconds": time.perf_counter() - began - load_seconds,
        }

    def _resume(self, state: TrainState, restored: Restored) -> None:
        self._resumed_from = restored.commit
        if self._chooser and (saved := restored.facts.get("optimizer")):
            self._chooser.resolve_optimizer(self._feed.peek(), self.n_steps, saved)
        self._feed.restore(restored.data_state)
        if step := int(state.step):
            changes = self._place.changes(restored.facts)
            self._report(f"Resuming from step {step}.{changes}", is_important=True)

    def _report_optimizer(self, step: int) -> None:
        line = self._chooser.optimizer_line if self._chooser else ""
        if line and (self.n_steps is None or step < self.n_steps):
            self._report(line)

    def _make_runner(self, state: TrainState, **options: Any) -> runner.Runner:
        """Creates the runner; the options are those of `make_programs`."""
        codec, place = StateCodec(state), self._place
        programs = make_programs(self._training, codec, place, **options)
        return runner.Runner(state, codec=codec, feed=self._feed, place=place, programs=programs)

    def __repr__(self) -> str:
        """Returns the progress and the size of the model."""
        total = "" if self.n_steps is None else f" of {self.n_steps}"
        return f"<TrainLoop at step {self.step}{total}, {self._setup['n_weights']:,} weights>"

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._runner.step

    @property
    def n_steps(self) -> int | None:
        """The step at which iteration ends; None for the end of the data."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int | None) -> None:
        self._n_steps = n_steps if n_steps is None else check_count("n_steps", n_steps, 0)

    @property
    def n_steps_per_checkpoint(self) -> int:
        """Number of steps between two checkpoints."""
        return self._n_steps_per_checkpoint

    @n_steps_per_checkpoint.setter
    def n_steps_per_checkpoint(self, n: int) -> None:
        self._n_steps_per_checkpoint = check_count("n_steps_per_checkpoint", n, 1)

    @property
    def stop_flag(self) -> StopRequest | None:
        """Polled at every dispatch; once set, the loop ends with a checkpoint."""
        return self._runner.stop_flag

    @stop_flag.setter
    def stop_flag(self, stop_flag: StopRequest | None) -> None:
        self._runner.stop_flag = stop_flag

    @property
    def before_dispatch(self) -> Callable[[int], object] | None:
        """A function that is called before each dispatch with the number of completed steps."""
        return self._runner.before_dispatch

    @before_dispatch.setter
    def before_dispatch(self, hook: Callable[[int], object] | None) -> None:
        self._runner.before_dispatch = hook

    @property
    def facts(self) -> dict[str, Any]:
        """Choices that the run has made, which are saved with its checkpoints."""
        own = {"steps_per_dispatch": self._runner.steps_per_dispatch}
        return own | (self._chooser.facts if self._chooser else {}) | self._place.facts

    @property
    def state(self) -> TrainState:
        """The state after `step` steps; it stays valid."""
        return self._runner.state

    @property
    def layout(self) -> Layout | None:
        """How arrays are split over a mesh; None for a single device."""
        return self._place.layout

    @property
    def model(self) -> Any:
        """The trained model: an NNX or Equinox module, the state of your own step, or parameters.

        Its parameters are those that training continues with; see also `averaged_model`.
        """
        return self._merged(self.state.params)

    @property
    def averaged_model(self) -> Any:
        """The model with the moving average of its parameters, in the form of `model`.

        Raises:
            ValueError: If the loop keeps no average.
        """
        if self.state.average is None:
            raise ValueError("There is no average: pass ema= to TrainLoop.")
        return self._merged(self.state.average)

    def _merged(self, params: Any) -> Any:
        variables = objective.merge_carry(self.state.variables, self.state.carry)
        if isinstance(self._training, StepTraining):
            return self._training.merge(params, variables)
        if self._fns is None or self._fns.merge is None:
            return merge_untrained(params, variables)[0]
        return self._fns.merge(params, variables)

    @property
    def model_fns(self) -> ModelFns:
        """The model as pure functions, for an `EvalLoop` or a custom step."""
        if self._fns is None:
            raise TypeError("This loop runs the task's own step and has no model functions.")
        return self._fns

    @property
    def parts(self) -> tuple[Training, runner.Runner, Options]:
        """What trains, what runs its steps, and how they are made; for `loop.lanes`."""
        return self._training, self._runner, self.options

    def peek_batch(self) -> Any:
        """Returns the batch of the next step, without consuming it."""
        return self._feed.peek()

    def pure_step(self, **changes: Any) -> Step:
        """Returns the step as a function, with gradients; `changes` are options to change."""
        options = dataclasses.replace(self.options, **changes)
        return self._training.make_step(options, keep_grads=True)

    def evaluation(
        self, metrics: Mapping[str, Callable[..., Any]], data: Iterable[Any], **options: Any
    ) -> EvalLoop:
        """Creates an `EvalLoop` for the same model and layout.

        Args:
            metrics: As for `EvalTask`.
            data: As for `EvalTask`.
            **options: `split`, if it is not that of training; further arguments of `EvalLoop`.
        """
        options.setdefault("layout", None if "devices" in options else self._place.layout)
        split = options.pop("split", self._training.split)
        task = EvalTask(metrics=metrics, data=data, split=split)
        return EvalLoop(task, model=self.model_fns, **options)

    def __iter__(self) -> Iterator[Summary]:
        """Yields checkpoints up to step `n_steps`; none, with a message, if that is reached."""
        if self.n_steps is not None and self.step >= self.n_steps:
            at = f"the loop is at step {self.step}, and n_steps={self.n_steps} is the total."
            self._report(f"Nothing to train: {at}", is_important=True)
        return self._checkpoints(self.n_steps)

    def __next__(self) -> Summary:
        """Runs the steps up to the next checkpoint, like `next_checkpoint`."""
        return self.next_checkpoint()

    def __call__(self, *, n_steps: int) -> Iterator[Summary]:
        """Yields checkpoints up to a total of `n_steps`; the loop's own `n_steps` is unchanged."""
        return self.until(n_steps)

    def until(self, n_steps: int) -> Iterator[Summary]:
        """Yields checkpoints up to a total of `n_steps`; the loop's own `n_steps` is unchanged."""
        if check_count("n_steps", n_steps, 0) < self.step:
            raise ValueError(
                f"n_steps is a total, got n_steps={n_steps}, but {self.step} steps are complete."
            )
        return self._checkpoints(n_steps)

    def next_step(self) -> Summary:
        """Runs one step.

        Raises:
            StopIteration: If the data has ended.
        """
        return self._advance(self.step + 1)

    def next_checkpoint(self) -> Summary:
        """Runs the steps up to the next checkpoint.

        Raises:
            StopIteration: If the data has ended, or `n_steps` are complete.
        """
        if self.n_steps is not None and self.step >= self.n_steps:
            raise StopIteration(f"All {self.n_steps} steps are complete.")
        return self._advance(self._next_target(self.n_steps))

    def checkpoint(self) -> Summary:
        """Returns the current state as a checkpoint, without running a step; its loss is NaN."""
        return self._summary(loss=jnp.full((), jnp.nan), metrics={"train": {}})

    def stop(self) -> None:
        """Ends an iteration after the current checkpoint."""
        self._is_stopped = True

    def _checkpoints(self, n_steps: int | None) -> Iterator[Summary]:
        self._is_stopped = False
        while n_steps is None or self.step < n_steps:
            if self._is_stopped or self._runner.should_stop():
                return
            try:
                checkpoint = self._advance(self._next_target(n_steps))
            except StopIteration:
                end = f"{self.step}." if n_steps is None else f"{self.step} of {n_steps}."
                self._report(f"The data ended at step {end}", is_important=n_steps is not None)
                return
            yield checkpoint

    def _next_target(self, n_steps: int | None) -> int:
        target = (self.step // self.n_steps_per_checkpoint + 1) * self.n_steps_per_checkpoint
        return target if n_steps is None else min(target, n_steps)

    def _advance(self, target: int) -> Summary:
        """Runs up to `target`, or less if the data ends or a stop is requested."""
        began = time.perf_counter()
        origin = self.step - self.step % self.n_steps_per_checkpoint
        segment = self._runner.advance(target, origin)
        if segment is None:
            raise StopIteration("The data has ended.")
        metrics, n_bad = train_metrics.read_metrics(segment, self.state, self._training, self.facts)
        elapsed = time.perf_counter() - began
        if n_bad and self.options.on_nan == "stop":
            raise self._runner.roll_back()
        train_metrics.add_counts(metrics, n_bad, self.options.on_nan, segment, elapsed)
        if self.step == target:  # Else a resumed run continues with the sums of this segment.
            self._runner.reset_sums(self._training.empty)
            if choice := self._runner.choose_dispatch(segment):
                # Only a change is printed.
                (_log.info if self._runner.steps_per_dispatch == 1 else self._report)(choice)
        return self._summary(
            n_completed_steps=segment.n_steps,
            elapsed_time=elapsed,
            compile_time=segment.compile_seconds,
            data_time=segment.data_seconds,
            loss=segment.output.loss,
            grads=train_metrics.grads_or_norms(metrics, segment, self.state, self._grads),
            metrics=metrics,
        )

    def _summary(self, **fields: Any) -> Summary:
        return Summary(
            state=self.state,
            step=self.step,
            data_state=self._feed.state,
            facts=self.facts,
            setup=self._setup | self._feed.form.sizes,
            resumed_from=self._resumed_from,
            **fields,
        )

    def _report(self, line: str, *, is_important: bool = False) -> None:
        _log.info(line)
        if self._stdout or (is_important and self._stdout is None):
            print(line, flush=True)
