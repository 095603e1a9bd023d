"""Runs steps up to a target: draws batches, keeps the device busy, owns the state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from tekoa.core import guard
from tekoa.core.state import StepOutput, TrainState, healthy
from tekoa.core.trees import PyTree
from tekoa.loop import pace
from tekoa.loop.dispatch import copied
from tekoa.loop.feed import Feed
from tekoa.loop.flat import FlatStep, Form, Leaves, Outputs
from tekoa.loop.placement import Placement
from tekoa.loop.programs import Programs
from tekoa.loop.task import StopFlag
from tekoa.loop.training import Training
from tekoa.optim import rates as optim_rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """The steps between two checkpoints.

    Attributes:
        output: What the last step told.
        has_grads: Whether that is the output of the step that keeps its gradients.
        n_steps: How many steps were run.
        batch: The last batch.
    """

    output: StepOutput
    has_grads: bool
    n_steps: int
    batch: Any


class Runner:
    """Runs steps; the state's arrays pass from one to the next.

    Args:
        state: Where to start; it is taken over.
        form: Turns it into the list of arrays that the steps take.
        feed: The batches.
        place: Where they go.
        programs: The steps.
        stop_flag: Polled at every dispatch; once set, `advance` returns early.

    Attributes:
        step: Completed steps, counted on the host: reading it off the state would wait.
        is_exhausted: Whether the data has ended.
        stop_flag: May be set later too.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        form: Form,
        feed: Feed,
        place: Placement,
        programs: Programs,
        stop_flag: StopFlag | None,
    ):
        self._now: list[tuple[Leaves, Outputs]] = [(form.leaves(state), [])]
        self._pace = pace.Pace()
        self._is_held = False
        self._compiled: set[FlatStep] = set()
        self._form = form
        self._feed, self._place, self.stop_flag = feed, place, stop_flag
        self._dispatcher, self._last = programs.dispatcher, programs.last
        self._trial = programs.trial
        self._queue: list[Any] = []
        self.step = int(state.step)
        self.is_exhausted = False
        self._start = self.step, feed.state

    @property
    def state(self) -> TrainState:
        """The present state; it stays valid, since the next step will run on a copy."""
        self._settle()
        self._is_held = True
        return self._form.state(self._now[0][0])

    def reset_sums(self, empty: Callable[[PyTree], PyTree]) -> None:
        """Empties the metrics gathered in the state."""
        state = self.state
        if state.sums:
            zeros = self._place.whole(empty(state.sums))
            self._now[:] = [(self._form.leaves(state.replace(sums=zeros)), [])]

    def go_back(self) -> str:
        """Goes back to the last good state and its place in the data; tells what was bad."""
        told = guard.diagnosis(self.state)
        state = self.state.replace(health=self._place.whole(healthy()))
        self._now[:] = [(self._form.leaves(state), [])]
        self.step, self.is_exhausted = int(state.step), False
        self._queue.clear()
        start, position = self._start
        self._feed.restore(position, then=self.step - start)
        return told

    def choose(self, stretch: Stretch) -> str:
        """Lets the dispatcher choose by measuring on copies of the state."""
        return self._dispatcher.choose(self._now[0][0], stretch.batch, stretch.n_steps)

    def should_stop(self) -> bool:
        """Whether someone has set the flag."""
        return self.stop_flag is not None and self.stop_flag.is_set()

    def advance(self, target: int, origin: int = 0) -> Stretch | None:
        """Runs up to `target`, less if the data ends or a stop is asked for.

        Args:
            target: Completed steps at the end.
            origin: Steps that go to the device at once are counted from this step.

        Returns:
            What was run; None if the data had ended before.
        """
        start = self.step
        self._start = start, self._feed.state
        has_grads, batch = False, None
        try:
            # What was drawn is run also after a stop: the data's position is behind it.
            while self.step < target and (
                self._queue or self.step == start or not self.should_stop()
            ):
                group, is_last = self._take(target, origin)
                if not group:
                    break
                batch, has_grads = group[-1], is_last
                self._run(group, is_last)
                self.step += len(group)
        except BaseException:
            self.step = int(self.state.step)  # An interrupt may have come in between.
            raise
        n_steps = self.step - start
        if not n_steps:
            return None
        self._settle()
        output = self._form.output(self._now[0][1])
        return Stretch(output=output, has_grads=has_grads, n_steps=n_steps, batch=batch)

    def _take(self, target: int, origin: int) -> tuple[list[Any], bool]:
        """Gives the batches of the next dispatch, and whether it is the last one."""
        # The last step before a checkpoint runs by itself: it gives its gradients.
        n_left = target - self.step - 1
        n = self._dispatcher.n_next(self.step - origin, n_left)
        # One more than needed is drawn, to know in time when the data has ended.
        self._fill(n if n_left < n or self.should_stop() else n + 1)
        queue = self._queue
        if self.is_exhausted and len(queue) <= n:
            n = 1
        group, self._queue = queue[:n], queue[n:]
        return group, n_left == 0 or (self.is_exhausted and len(queue) == 1)

    def _fill(self, n: int) -> None:
        while len(self._queue) < n and not self.is_exhausted:
            try:
                self._queue.append(self._place.batch(self._feed.next()))
            except StopIteration:
                self.is_exhausted = True

    def _run(self, group: list[Any], is_last: bool) -> None:
        run, batch = (self._last, group[0]) if is_last else self._dispatcher.program(group)
        trial = self._trial
        if trial is not None and run is trial.free:
            trial.add(self._now[0][0], batch, is_held=self._is_held)
        else:
            self._settle()
        leaves = self._now[0][0]
        # Someone holds the arrays that the next step would overwrite; or the program is yet to
        # be compiled, and an interrupt of that must leave them.
        if self._is_held or run not in self._compiled:
            leaves = copied(leaves)
        # In one piece of C code: an interrupt between the call and an assignment would lose
        # the new state, while the old one's arrays are gone already.
        self._now[:] = map(run, [leaves], [batch])
        self._is_held = False
        self._compiled.add(run)
        self._pace.sent(self._now[0][1][0])
        if trial is not None and trial.is_due:
            self._settle()

    def _settle(self) -> None:
        """Makes sure that the present state is one that guarded steps would have made."""
        if self._trial is None:
            return
        instead = self._trial.settled(self._now[0][0])
        if instead is not None:
            self._now[:] = [instead]
            self._is_held = False
        self._trial.close()


def read(
    stretch: Stretch, state: TrainState, training: Training
) -> tuple[dict[str, dict[str, float]], int]:
    """Waits for the device; gives the metrics of a stretch and the number of bad steps.

    Metrics are in the group "train"; the learning rates that the optimizer tells, by
    parameter group, are in "rates".
    """
    told = {name: getattr(stretch.output, name) for name in training.tells}
    numbers = {name: number for name, number in told.items() if number is not None}
    found, sums, rates, n_bad = jax.device_get(
        (
            numbers,
            state.sums,
            optim_rates.current_rates(state.opt_state),
            state.health.n_bad,
        )
    )
    values = {name: float(value) for name, value in found.items()}
    told = {"train": {**values, **training.compute(sums)}}
    if rates:
        told["rates"] = {group: float(rate) for group, rate in rates.items()}
    return told, int(n_bad)
