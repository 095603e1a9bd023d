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
from tekoa.core import batch as batches
from tekoa.core import guard, metrics, objective, trees
from tekoa.core import step as steps
from tekoa.core.model import ModelFns
from tekoa.core.state import StepOutput, TrainState
from tekoa.loop.checkpoint import Summary
from tekoa.loop.dispatch import Dispatcher, StepsPerDispatch
from tekoa.loop.feed import Feed
from tekoa.loop.placement import Placement
from tekoa.loop.task import Restored, StateReader, StopFlag, TrainTask

_log = logging.getLogger("tekoa")


class TrainLoop:
    """Trains, and yields a checkpoint every so many steps.

    Attributes:
        step: Completed optimizer steps.
        n_steps: Where iterating ends; None: at the end of the data.
        n_steps_per_checkpoint: How far apart checkpoints are.
    """

    def __init__(
        self,
        init: Any,
        task: TrainTask,
        *,
        n_steps_per_checkpoint: int = 100,
        n_steps: int | None = None,
        rnkey: jax.Array | None = None,
        collections: Mapping[str, Sequence[str]] | None = None,
        mutable_collections: bool | Sequence[str] = True,
        input_sample: Any = None,
        devices: Sequence[jax.Device] | None = None,
        stdout: bool = False,
        accumulate: int = 1,
        ema: float | None = None,
        precision: objective.Precision = "float32",
        on_nan: guard.OnNan = "stop",
        grads: bool = True,
        steps_per_dispatch: StepsPerDispatch = "auto",
        stop_flag: StopFlag | None = None,
    ):
        """Initialises the model, or reads its state, and compiles nothing yet.

        Args:
            init: A Linen `model.init`, an NNX or Equinox module, plain functions, `ModelFns`,
                or a reader of checkpoints around one of these.
            task: Model function, optimizer, loss and data.
            n_steps_per_checkpoint: Checkpoints fall on its multiples and on the last step.
            n_steps: Steps in total; None: until the data ends.
            rnkey: Root of all randomness; `jax.random.key(0)` by default.
            collections: For Linen: rng streams at "init" and at "apply".
            mutable_collections: For Linen: which collections training may change.
            input_sample: Inputs to initialise with; those of the first batch by default.
            devices: Devices among which the rows of a batch are split.
            stdout: If true, what the loop has to say is printed.
            accumulate: As `make_train_step`.
            ema: As `make_train_step`.
            precision: As `make_train_step`.
            on_nan: As `make_train_step`; "stop" raises `NonFiniteError`.
            grads: If true, checkpoints hold the gradients of their step.
            steps_per_dispatch: Steps that go to the device at once; "auto" measures.
            stop_flag: Polled at every step; once set, the loop ends with a checkpoint.

        Raises:
            TypeError: If the model, the data or the loss have not the form described.
            ValueError: If a number is out of range or the data is empty.
        """
        if n_steps_per_checkpoint < 1:
            raise ValueError(
                f"n_steps_per_checkpoint must be 1 or more, got {n_steps_per_checkpoint}."
            )
        start = time.perf_counter()
        self.n_steps, self.n_steps_per_checkpoint = n_steps, n_steps_per_checkpoint
        self._stdout, self._on_nan, self._stop_flag = stdout, on_nan, stop_flag
        self._is_stopped = self._is_exhausted = False
        self._feed = Feed(task.data)
        self._place = Placement(devices)
        reader = init if isinstance(init, StateReader) else None
        self._fns = detect.as_model_fns(
            reader.target if reader else init,
            task.apply,
            collections=collections,
            mutable=mutable_collections,
        )
        loaded = time.perf_counter()
        self._state = self._initialised(task, rnkey, input_sample, ema)
        restored = reader.restore(self._state) if reader else None
        if restored is not None:
            self._resume(restored)
            steps_per_dispatch = restored.facts.get("steps_per_dispatch") or steps_per_dispatch
        self._state = self._place.state(self._state)
        self.step = int(self._state.step)
        options: dict[str, Any] = {
            "accumulate": accumulate,
            "ema": ema,
            "precision": precision,
            "on_nan": on_nan,
            "split": task.split,
        }
        lean = steps.make_train_step(self._fns, task.loss, task.optimizer, **options)
        self._dispatcher = Dispatcher(lean, steps_per_dispatch)
        full = steps.make_train_step(
            self._fns, task.loss, task.optimizer, keep_grads=grads, **options
        )
        self._full = jax.jit(full, donate_argnums=0) if grads else self._dispatcher.one
        self._setup = {
            "load_seconds": loaded - start,
            "init_seconds": time.perf_counter() - loaded,
            "n_weights": trees.n_elements(self._state.params),
            "n_bytes": trees.n_bytes(self._state.params),
        }
        self._is_held = False

    @property
    def state(self) -> TrainState:
        """The state after `step` steps; it stays valid."""
        self._is_held = True
        return self._state

    @property
    def model(self) -> Any:
        """The trained model: the module for NNX and Equinox, else the evaluation parameters."""
        state = self.state
        if self._fns.merge is None:
            return state.eval_params
        return self._fns.merge(
            state.eval_params, objective.with_carry(state.variables, state.carry)
        )

    @property
    def model_fns(self) -> ModelFns:
        """The model as pure functions, for an `EvalLoop` or a step of one's own."""
        return self._fns

    def __iter__(self) -> Iterator[Summary]:
        """Yields checkpoints up to `n_steps`."""
        return self._run(self.n_steps)

    def __call__(self, *, n_steps: int) -> Iterator[Summary]:
        """Yields checkpoints up to `n_steps` in total; the loop's own `n_steps` stays."""
        return self._run(n_steps)

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
        return Summary(
            state=self.state,
            step=self.step,
            loss=jnp.full((), jnp.nan),
            grads=None,
            n_completed_steps=0,
            elapsed_time=0.0,
            data_state=self._feed.state,
            facts={"steps_per_dispatch": self._dispatcher.n_together},
            setup=self._setup,
            metrics={"train": {}},
        )

    def stop(self) -> None:
        """Lets the loop end after the checkpoint it is at."""
        self._is_stopped = True

    def _run(self, n_steps: int | None) -> Iterator[Summary]:
        if n_steps is not None and n_steps < self.step:
            raise ValueError(
                f"n_steps={n_steps} is the total; this loop has completed {self.step} already."
            )
        return self._checkpoints(n_steps)

    def _checkpoints(self, n_steps: int | None) -> Iterator[Summary]:
        self._is_stopped = False
        while not self._should_stop() and (n_steps is None or self.step < n_steps):
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
        start, began = self.step, time.perf_counter()
        queue: list[Any] = []
        output, has_grads = None, False
        while self.step < target and not (self._should_stop() and self.step > start):
            self._fill(queue, min(target - self.step, 2))
            if not queue:
                break
            # The last step before a yield runs by itself: it may have to give its gradients.
            n_left = target - self.step - 1
            n = self._dispatcher.n_next(self.step, n_left) if n_left else 1
            self._fill(queue, n)
            is_last = self.step + 1 == target or (self._is_exhausted and len(queue) == 1)
            group, queue = (queue[:n], queue[n:]) if len(queue) >= n else (queue[:1], queue[1:])
            output = self._dispatch(group, is_last)
            has_grads = is_last
            self.step += len(group)
        for batch in queue:  # Drawn already: the position in the data is behind it.
            output, has_grads = self._dispatch([batch], False), False
            self.step += 1
        if output is None:
            self._say("The data has ended: no step is left to run.")
            raise StopIteration
        if self._is_exhausted:
            self._say(f"The data ended at step {self.step}.")
        return self._checkpoint(output, has_grads, start, began)

    def _fill(self, queue: list[Any], n: int) -> None:
        while len(queue) < n and not self._is_exhausted:
            try:
                queue.append(self._place.batch(self._feed.next()))
            except StopIteration:
                self._is_exhausted = True

    def _dispatch(self, group: list[Any], is_last: bool) -> StepOutput:
        if self._is_held:
            # A yielded checkpoint holds the arrays that the next step would overwrite.
            self._state = _copied(self._state)
            self._is_held = False
        if is_last:
            self._state, output = self._full(self._state, group[0])
        else:
            self._state, output = self._dispatcher.run(self._state, group)
        return output

    def _checkpoint(self, output: StepOutput, has_grads: bool, start: int, began: float) -> Summary:
        read = jax.device_get(
            (output.loss, output.gradients_l2norm, output.weights_l2norm, self._state.sums)
        )
        loss, gradients_l2norm, weights_l2norm, sums = read
        elapsed = time.perf_counter() - began
        n_bad = self._check_health()
        values = {
            "loss": float(loss),
            "seconds_per_step": elapsed / max(1, self.step - start),
            "gradients_l2norm": float(gradients_l2norm),
            "weights_l2norm": float(weights_l2norm),
            **metrics.compute(sums),
            **({"skipped_steps": float(n_bad)} if n_bad else {}),
        }
        state, self._is_held = self._state, True
        # The copy of the next dispatch starts with empty sums; this one stays as it is.
        self._state = state.replace(sums=metrics.zeros(state.sums)) if state.sums else state
        return Summary(
            state=state,
            step=self.step,
            loss=output.loss,
            grads=output.grads if has_grads else None,
            n_completed_steps=self.step - start,
            elapsed_time=elapsed,
            data_state=self._feed.state,
            facts={"steps_per_dispatch": self._dispatcher.n_together},
            setup=self._setup,
            metrics={"train": values},
        )

    def _check_health(self) -> int:
        """Counts bad steps; raises if they are to stop the loop."""
        n_bad = int(self._state.health.n_bad)
        if n_bad and self._on_nan == "stop":
            self.step = int(self._state.step)
            raise guard.NonFiniteError(
                f"{guard.diagnosis(self._state)} The loop's state is that of step {self.step}, the "
                'last good one. Lower the learning rate, clip gradients, or pass on_nan="skip".'
            )
        return n_bad

    def _should_stop(self) -> bool:
        return self._is_stopped or (self._stop_flag is not None and self._stop_flag.is_set())

    def _initialised(
        self, task: TrainTask, rnkey: jax.Array | None, input_sample: Any, ema: float | None
    ) -> TrainState:
        rnkey = jax.random.key(0) if rnkey is None else rnkey
        sample = self._feed.peek()
        inputs, _ = task.split(sample)
        batches.check_arrays(sample)
        if input_sample is not None:
            inputs = input_sample if isinstance(input_sample, tuple) else (input_sample,)
        state = steps.init_state(self._fns, task.optimizer, rnkey, inputs=inputs, ema=ema)
        loss_of = objective.make_objective(self._fns, task.loss, split=task.split)
        given = objective.with_carry(state.variables, state.carry)
        _, (_, _, found) = jax.eval_shape(loss_of, state.params, given, sample, state.rng)
        return state.replace(sums=metrics.zeros(found))

    def _resume(self, restored: Restored) -> None:
        self._state = restored.state
        self._feed.restore(restored.data_state)
        self._say(f"Goes on from step {int(restored.state.step)}.")

    def _say(self, line: str) -> None:
        _log.info(line)
        if self._stdout:
            print(line, flush=True)


@jax.jit
def _copied(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)
