"""TrainLoop: an iterator of checkpoints over the pure step, driven by its user.

`step` is the number of completed optimizer steps. Checkpoints fall on multiples of
`n_steps_per_checkpoint` and on the last step.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.bridges import detect
from tekoa.core import guard, objective, trees
from tekoa.core.model import ModelFns
from tekoa.core.sharding import Layout
from tekoa.core.sharding_specs import Rules
from tekoa.core.state import TrainState
from tekoa.loop import placement, runner, start
from tekoa.loop.checkpoint import Metrics, Summary
from tekoa.loop.dispatch import StepsPerDispatch
from tekoa.loop.feed import Feed
from tekoa.loop.flat import Form
from tekoa.loop.programs import make_programs
from tekoa.loop.task import StateReader, StopFlag, TrainTask, check_count
from tekoa.loop.training import ModelTraining, Options, Training

_log = logging.getLogger("tekoa")


class TrainLoop:
    """Trains, and yields a checkpoint every so many steps.

    Args:
        init: A Linen `model.init`, an NNX or Equinox module, plain functions, `ModelFns`,
            or a reader of checkpoints around one of these.
        task: Model function, optimizer, loss and data; or a `Training`, which brings its own
            step.
        n_steps_per_checkpoint: Checkpoints fall on its multiples and on the last step.
        n_steps: Steps in total; None: until the data ends.
        rnkey: Root of all randomness; `jax.random.key(0)` by default.
        collections: For Linen: rng streams at "init" and at "apply".
        mutable_collections: For Linen: which collections training may change.
        input_sample: Inputs to initialise with; those of the first batch by default.
        devices: Devices among which the rows of a batch are split; all hold all parameters.
        layout: How parameters, optimizer state and batches are split over a mesh.
        optimizer_rules: How the optimizer's state is split, as `Layout` has it.
        stdout: If true, what the loop has to say is printed.
        accumulate: As `make_train_step`.
        ema: As `make_train_step`.
        precision: As `make_train_step`.
        on_nan: As `make_train_step`; "stop" raises `NonFiniteError`.
        grads: If true, checkpoints hold the gradients of their step.
        steps_per_dispatch: Steps that go to the device at once. "auto" measures once, at the
            first checkpoint after a thousand steps.
        stop_flag: Polled at every dispatch; once set, the loop ends with a checkpoint.

    Raises:
        TypeError: If the model, the data or the loss have not the form described.
        ValueError: If a number is out of range or the data is empty.
    """

    def __init__(
        self,
        init: Any,
        task: TrainTask | Training,
        *,
        n_steps_per_checkpoint: int = 100,
        n_steps: int | None = None,
        rnkey: jax.Array | None = None,
        collections: Mapping[str, Sequence[str]] | None = None,
        mutable_collections: bool | Sequence[str] = True,
        input_sample: Any = None,
        devices: Sequence[Any] | None = None,
        layout: Layout | None = None,
        optimizer_rules: Rules | str | None = None,
        stdout: bool = False,
        accumulate: int = 1,
        ema: float | None = None,
        precision: objective.Precision = "float32",
        on_nan: guard.OnNan = "stop",
        grads: bool = True,
        steps_per_dispatch: StepsPerDispatch = "auto",
        stop_flag: StopFlag | None = None,
    ):
        began = time.perf_counter()
        self.n_steps, self.n_steps_per_checkpoint = n_steps, n_steps_per_checkpoint
        self._stdout, self._is_stopped = stdout, False
        self._stops_at_nan, self._counts_bad = on_nan == "stop", on_nan == "count"
        reader = init if isinstance(init, StateReader) else None
        self._feed = Feed(task.data, task.split)
        self._fns: ModelFns | None = None
        if isinstance(task, TrainTask):
            self._fns = detect.as_model_fns(
                reader.target if reader else init,
                task.apply,
                collections=collections,
                mutable=mutable_collections,
            )
            task = ModelTraining(self._fns, task, input_sample)
        self._training: Training = task
        loaded = time.perf_counter()
        place = placement.Placement(placement.choose_layout(layout, devices, optimizer_rules))
        options = Options(accumulate=accumulate, ema=ema, precision=precision, on_nan=on_nan)
        state, restored = start.starting_state(
            task,
            jax.random.key(0) if rnkey is None else rnkey,
            batch=self._feed.peek(),
            place=place,
            options=options,
            reader=reader,
        )
        if restored is not None:
            self._feed.restore(restored.data_state)
        if restored is not None and int(state.step):
            self._say(f"Goes on from step {int(state.step)}.{place.changes(restored.facts)}")
        form = Form(state)
        programs = make_programs(
            task,
            form,
            place,
            options=options,
            wanted=start.settled_dispatch(steps_per_dispatch, restored, place),
            keeps_grads=grads,
        )
        self._dispatcher = programs.dispatcher
        self._runner = runner.Runner(
            state, form=form, feed=self._feed, place=place, programs=programs, stop_flag=stop_flag
        )
        self._place = place
        self._setup = {
            "load_seconds": loaded - began,
            "init_seconds": time.perf_counter() - loaded,
            "n_weights": trees.n_elements(state.params),
            "n_bytes": trees.n_bytes(state.params),
        }

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._runner.step

    @property
    def n_steps(self) -> int | None:
        """Where iterating ends; None: at the end of the data."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int | None) -> None:
        self._n_steps = n_steps if n_steps is None else check_count("n_steps", n_steps, 0)

    @property
    def n_steps_per_checkpoint(self) -> int:
        """How far apart checkpoints are."""
        return self._n_steps_per_checkpoint

    @n_steps_per_checkpoint.setter
    def n_steps_per_checkpoint(self, n: int) -> None:
        self._n_steps_per_checkpoint = check_count("n_steps_per_checkpoint", n, 1)

    @property
    def state(self) -> TrainState:
        """The state after `step` steps; it stays valid."""
        return self._runner.state

    @property
    def model(self) -> Any:
        """The trained model: the module for NNX and Equinox, else the evaluation parameters."""
        state = self.state
        if self._fns is None or self._fns.merge is None:
            return state.eval_params
        return self._fns.merge(
            state.eval_params, objective.with_carry(state.variables, state.carry)
        )

    @property
    def model_fns(self) -> ModelFns:
        """The model as pure functions, for an `EvalLoop` or a step of one's own."""
        if self._fns is None:
            raise TypeError("This loop runs a step of its task's own; it knows no model.")
        return self._fns

    def __iter__(self) -> Iterator[Summary]:
        """Yields checkpoints up to `n_steps`."""
        return self._checkpoints(self._total(self.n_steps))

    def __call__(self, *, n_steps: int) -> Iterator[Summary]:
        """Yields checkpoints up to `n_steps` in total; the loop's own `n_steps` stays."""
        return self._checkpoints(self._total(check_count("n_steps", n_steps, 0)))

    def next_step(self) -> Summary:
        """Runs one step.

        Raises:
            StopIteration: If the data has ended.
        """
        return self._advance(self.step + 1)

    def next_checkpoint(self) -> Summary:
        """Runs the steps that remain to the next checkpoint.

        Raises:
            StopIteration: If the data has ended, or `n_steps` are done.
        """
        if self.n_steps is not None and self.step >= self.n_steps:
            raise StopIteration(f"All {self.n_steps} steps are done.")
        return self._advance(self._next_target(self.n_steps))

    def checkpoint(self) -> Summary:
        """The present state as a record, without running a step; its loss is NaN."""
        loss = jnp.full((), jnp.nan)
        return self._record(loss=loss, grads=None, n_steps=0, elapsed_time=0.0, found={"train": {}})

    def stop(self) -> None:
        """Lets an iteration end after the checkpoint it is at."""
        self._is_stopped = True

    def _total(self, n_steps: int | None) -> int | None:
        if n_steps is not None and n_steps < self.step:
            raise ValueError(
                f"n_steps={n_steps} is the total; this loop has completed {self.step} already."
            )
        return n_steps

    def _checkpoints(self, n_steps: int | None) -> Iterator[Summary]:
        self._is_stopped = False
        while n_steps is None or self.step < n_steps:
            if self._is_stopped or self._runner.should_stop():
                return
            try:
                checkpoint = self._advance(self._next_target(n_steps))
            except StopIteration:
                return
            yield checkpoint

    def _next_target(self, n_steps: int | None) -> int:
        every = self.n_steps_per_checkpoint
        target = (self.step // every + 1) * every
        return target if n_steps is None else min(target, n_steps)

    def _advance(self, target: int) -> Summary:
        """Runs up to `target`, less if the data ends or a stop is asked for."""
        was_exhausted, began = self._runner.is_exhausted, time.perf_counter()
        origin = self.step - self.step % self.n_steps_per_checkpoint
        stretch = self._runner.advance(target, origin)
        if self._runner.is_exhausted and not was_exhausted:
            self._say(f"The data ended at step {self.step}.")
        if stretch is None:
            raise StopIteration("The data has ended.")
        found, n_bad = runner.read(stretch, self._runner.state, self._training)
        elapsed = time.perf_counter() - began
        if n_bad and self._stops_at_nan:
            self._raise_bad()
        if n_bad:
            found["train"]["bad_steps" if self._counts_bad else "skipped_steps"] = float(n_bad)
        found["train"]["seconds_per_step"] = elapsed / stretch.n_steps
        if self.step == target:  # Else a resumed run goes on with the sums of this stretch.
            self._runner.reset_sums(self._training.empty)
            if self._dispatcher.is_choice_due(self.step, stretch.n_steps):
                told = self._runner.choose(stretch)
                # That steps go on as they did is for the log alone.
                (_log.info if self._dispatcher.n_together == 1 else self._say)(told)
        return self._record(
            loss=stretch.output.loss,
            grads=stretch.output.grads if stretch.has_grads else None,
            n_steps=stretch.n_steps,
            elapsed_time=elapsed,
            found=found,
        )

    def _record(
        self, *, loss: Any, grads: Any, n_steps: int, elapsed_time: float, found: Metrics
    ) -> Summary:
        return Summary(
            state=self.state,
            step=self.step,
            loss=loss,
            grads=grads,
            n_completed_steps=n_steps,
            elapsed_time=elapsed_time,
            data_state=self._feed.state,
            facts={"steps_per_dispatch": self._dispatcher.n_together, **self._place.facts},
            setup=self._setup,
            metrics=found,
        )

    def _raise_bad(self) -> None:
        told = self._runner.go_back()
        raise guard.NonFiniteError(
            f"{told} The loop's state is that of step {self.step}, the "
            'last good one. Lower the learning rate, clip gradients, or pass on_nan="skip".'
        )

    def _say(self, line: str) -> None:
        _log.info(line)
        if self._stdout:
            print(line, flush=True)
