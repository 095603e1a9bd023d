"""Runs steps up to a target: draws batches, keeps the device busy, owns the state."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

from tekoa.core import nonfinite
from tekoa.core.state import Health, StepOutput, TrainState
from tekoa.core.trees import PyTree
from tekoa.loop.engine import lookahead
from tekoa.loop.engine.dispatch import compiling, copy_leaves
from tekoa.loop.engine.flat_state import FlatStep, Leaves, Outputs, StateCodec
from tekoa.loop.engine.programs import Programs
from tekoa.loop.feed import BatchFeed, Form
from tekoa.loop.task import StopRequest
from tekoa.sharding.placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps between two checkpoints.

    Attributes:
        output: Output of the last step.
        has_grads: Whether that step was the one that may return its gradients.
        n_steps: How many steps ran.
        batch: The last batch.
        compile_seconds: How long their programs took to compile.
        data_seconds: Time spent on reading batches and sending them to the device.
    """

    output: StepOutput
    has_grads: bool
    n_steps: int
    batch: Any
    compile_seconds: float = 0.0
    data_seconds: float = 0.0


class Group(Protocol):
    """Runs the steps of several runners together."""

    def advance(self, runner: "Runner", target: int) -> Segment | None:
        """Returns the steps of one runner up to `target`, which `Runner.adopt` has received."""
        ...


class Runner:
    """Runs steps; each consumes the arrays of the state before it.

    Args:
        state: The state to start from; it is consumed.
        codec: Converts it to the list of arrays that the steps use.
        feed: The batches.
        place: Where arrays are placed.
        programs: The steps.

    Attributes:
        step: Completed steps, counted on the host: reading it from the state would wait.
        is_exhausted: Whether the data has ended.
        stop_flag: If not None, polled at every dispatch; once set, `advance` returns early.
        before_dispatch: If not None, called before each dispatch with the completed steps.
        codec: Converts states to lists of arrays.
        feed: The batches.
        group: If not None, it runs the steps of this and of other runners together.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        codec: StateCodec,
        feed: BatchFeed,
        place: Placement,
        programs: Programs,
    ):
        # A list with one entry, so that it can be replaced by a single operation; see `_run`.
        self._current: list[tuple[Leaves, Outputs]] = [(codec.flatten(state), [])]
        self._lookahead = lookahead.Lookahead()
        # A list of arrays that must stay valid, and the same as a state.
        self._held: tuple[Leaves, TrainState] | None = None
        self._empty_sums: PyTree = None
        self._compiled: set[tuple[FlatStep, Form]] = set()  # Programs, and what they ran on.
        self._compile_seconds = 0.0
        self.codec, self.feed, self._place = codec, feed, place
        self.group: Group | None = None
        self.stop_flag: StopRequest | None = None
        self.before_dispatch: Callable[[int], object] | None = None
        self._dispatcher, self._last = programs.dispatcher, programs.last
        self._rollback = programs.rollback
        self._queue: list[tuple[Any, Form]] = []
        self.step = int(state.step)
        self.is_exhausted, self._data_seconds = False, 0.0
        self._start = self.step, feed.state

    @property
    def state(self) -> TrainState:
        """The current state; it stays valid, since the next step runs on a copy."""
        self._verify_unguarded()
        leaves = self._current[0][0]
        # Compared, not only reset after a step: an interrupt may come in between.
        if self._held is None or self._held[0] is not leaves:
            self._held = leaves, self.codec.unflatten(leaves)
        return self._held[1]

    @property
    def leaves(self) -> Leaves:
        """The arrays of the current state, which stay valid."""
        return self.codec.flatten(self.state)

    def adopt(self, leaves: Leaves, outputs: Outputs, n_steps: int, position: Any) -> None:
        """Continues from what a group has computed, at its data position."""
        self._current[:] = [(leaves, outputs)]
        self._held = None
        self.step += n_steps
        if self.feed.state != position:
            self.feed.restore(position)

    def restart(self, state: TrainState, position: Any, steps_per_dispatch: int | None) -> None:
        """Continues from another state and data position, with the programs that are compiled."""
        self.feed.restore(position)
        self._queue.clear()
        if self._rollback is not None:
            self._rollback.close()
        state = self._place.state(state)
        self._replace(state, self.codec.flatten(state))
        self.step, self.is_exhausted = int(state.step), False
        self._start = self.step, position
        self._dispatcher.steps_per_dispatch = steps_per_dispatch

    def reset_sums(self, empty: Callable[[PyTree], PyTree]) -> None:
        """Empties the metrics accumulated in the state."""
        state = self.state
        if not state.sums:
            return
        if self._empty_sums is None:  # The state is held, so no step consumes these arrays.
            self._empty_sums = self._place.whole(empty(state.sums))
        leaves = self.codec.with_sums(self._current[0][0], self._empty_sums)
        self._replace(state.replace(sums=self._empty_sums), leaves)

    def roll_back(self) -> nonfinite.NonFiniteError:
        """Goes back to the last good state and its data position; returns the error to raise."""
        diagnosis = nonfinite.diagnosis(self.state)
        state = self.state.replace(health=self._place.whole(Health.zero()))
        self._replace(state, self.codec.flatten(state))
        self.step, self.is_exhausted = int(state.step), False
        self._queue.clear()
        start, position = self._start
        self.feed.restore(position, then=self.step - start)
        advice = "Lower the learning rate, clip gradients,"
        if position is not None and (entries := self.feed.nonfinite_entries()):
            advice = f"The batch itself has NaN or Inf: {entries}. Clean the data,"
        return nonfinite.NonFiniteError(
            f"{diagnosis} The loop is back at step {self.step}, the last good one. {advice} "
            'or pass on_nan="skip".'
        )

    def _replace(self, state: TrainState, leaves: Leaves) -> None:
        self._held = leaves, state  # First: an interrupt must not leave them to be consumed.
        self._current[:] = [(leaves, [])]

    @property
    def steps_per_dispatch(self) -> int | None:
        """Steps per dispatch; None until the dispatcher has measured."""
        return self._dispatcher.steps_per_dispatch

    def choose_dispatch(self, segment: Segment) -> str | None:
        """Lets the dispatcher choose if that is due; returns a line that reports the choice."""
        if not self._dispatcher.is_choice_due(self.step, segment.n_steps):
            return None
        return self._dispatcher.choose(self._current[0][0], segment.batch, segment.n_steps)

    def should_stop(self) -> bool:
        """Whether a stop is requested."""
        return self.stop_flag is not None and self.stop_flag.is_set()

    def advance(self, target: int, origin: int = 0) -> Segment | None:
        """Runs up to `target`, or less if the data ends or a stop is requested.

        Args:
            target: Completed steps at the end.
            origin: The step from which groups of steps are counted.

        Returns:
            The steps that ran; None if the data had already ended.
        """
        start = self.step
        self._start = start, self.feed.state
        if self.group is not None:
            return self.group.advance(self, target)
        has_grads, batch, self._compile_seconds = False, None, 0.0
        self._data_seconds = 0.0
        try:
            # Batches in the queue are run even after a stop: the data position is behind them.
            while self.step < target and (
                self._queue or self.step == start or not self.should_stop()
            ):
                if self.before_dispatch is not None:
                    self.before_dispatch(self.step)
                group, form, is_last = self._next_group(target, origin)
                if form is None:
                    break
                batch, has_grads = group[-1], is_last
                self._run(group, form, is_last)
                self.step += len(group)
        except BaseException:
            # An interrupt may have come in between. If the step failed, it has consumed its arrays:
            # its error is the one to report, such as that another process was lost.
            with contextlib.suppress(ValueError, RuntimeError):
                self.step = int(self.state.step)
            raise
        n_steps = self.step - start
        if not n_steps:
            return None
        self._verify_unguarded(all_ran=True)
        output = self.codec.unflatten_output(self._current[0][1])
        return Segment(
            output=output,
            has_grads=has_grads,
            n_steps=n_steps,
            batch=batch,
            compile_seconds=self._compile_seconds,
            data_seconds=self._data_seconds,
        )

    def _next_group(self, target: int, origin: int) -> tuple[list[Any], Form | None, bool]:
        """Returns the batches of the next dispatch, their form, and whether it is the last one."""
        # The last step before a checkpoint runs by itself: it may return its gradients.
        n_left = target - self.step - 1
        n = self._dispatcher.n_next(self.step - origin, n_left)
        # One more than needed is drawn, to learn in time that the data has ended.
        self._fill_queue(n if n_left < n or self.should_stop() else n + 1)
        queue = self._queue
        if self.is_exhausted and len(queue) <= n:
            n = 1
        if n > 1 and any(form is not queue[0][1] for _, form in queue[:n]):
            n = 1  # Batches of different lengths cannot be stacked.
        group, self._queue = [batch for batch, _ in queue[:n]], queue[n:]
        form = queue[0][1] if queue else None
        return group, form, n_left == 0 or (self.is_exhausted and len(queue) == 1)

    def _fill_queue(self, n: int) -> None:
        began = time.perf_counter()
        while len(self._queue) < n and not self.is_exhausted:
            try:
                batch = self._place.batch(self.feed.next())
                self._queue.append((batch, self.feed.form))
            except StopIteration:
                self.is_exhausted = True
        self._data_seconds += time.perf_counter() - began

    def _run(self, group: list[Any], form: Form, is_last: bool) -> None:
        run, batch = (self._last, group[0]) if is_last else self._dispatcher.program(group)
        rollback = self._rollback
        leaves = self._current[0][0]
        is_held = self._held is not None and self._held[0] is leaves
        if rollback is not None:
            rollback.add(run, leaves, batch, is_held=is_held)
        # A step consumes its arrays. They are copied if someone holds them, or if the program is
        # yet to be compiled: an interrupt during compilation must not lose them.
        is_new, began = (run, form) not in self._compiled, time.perf_counter()
        if is_held or is_new:
            leaves = copy_leaves(leaves)
        # In one piece of C code: an interrupt between the call and an assignment would lose
        # the new state, while the old one's arrays are gone already.
        with compiling(run) if is_new else contextlib.nullcontext():
            self._current[:] = map(run, [leaves], [batch])
        self._held = None
        if is_new:  # The call returns before the step is done, but not before it is compiled.
            self._compile_seconds += time.perf_counter() - began
            self._compiled.add((run, form))
        self._lookahead.sent(self._current[0][1][0])
        if rollback is not None and rollback.is_due:
            self._verify_unguarded(all_ran=True)

    def _verify_unguarded(self, *, all_ran: bool = False) -> None:
        """Checks the unguarded steps since the last check; replays them if one met NaN or Inf."""
        if self._rollback is None:
            return
        replayed = self._rollback.verify(self._current[0][0], all_ran=all_ran)
        if replayed is not None:
            self._current[:] = [replayed]
            self._held = None
        self._rollback.close()
