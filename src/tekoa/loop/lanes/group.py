"""Loops whose steps differ in numbers only run together: the lanes of a group.

Each lane is an ordinary loop. The first one that is asked to run up to a step runs all lanes of
the group that are at the same step; the others receive what was computed for them when they are
asked. So whoever drives the loops takes them in turn, always those that are behind first.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tekoa.core import nonfinite
from tekoa.loop.engine import lookahead
from tekoa.loop.engine.flat_state import Leaves, Outputs
from tekoa.loop.engine.runner import Runner, Segment
from tekoa.loop.lanes import constants, machine
from tekoa.loop.task import Options, Training
from tekoa.loop.train import TrainLoop


class _Lane:
    """One loop: its runner, and its traced steps."""

    def __init__(self, loop: TrainLoop):
        training, self.runner, self.options = loop.parts
        self._training: Training = training
        self._batch = loop.peek_batch()
        self.limits = loop.n_steps, loop.n_steps_per_checkpoint

    def trace(self, options: Options, *, loss_only: bool) -> constants.Traced:
        step = self._training.make_step(options)
        flat = self.runner.codec.flat_step(step, loss_only=loss_only)
        return constants.trace(flat, self.runner.leaves, self._batch)


class LaneGroup:
    """Lanes that one program runs; see the module.

    Args:
        lanes: The lanes, with steps that are alike.
        last: Their traced last step before a checkpoint.
        how: How they run.
    """

    def __init__(
        self, lanes: Sequence[_Lane], last: Sequence[constants.Traced], how: machine.How = "auto"
    ):
        self.how: machine.How = machine.choose_how(how)
        self._lanes = list(lanes)
        self._last_steps = last
        self._runners = [lane.runner for lane in lanes]
        self._pending: dict[int, tuple[Leaves, Outputs, int, Any]] = {}
        self._ended: set[int] = set()
        # As in `programs.make_programs`: steps on CPU run without a guard against NaN and Inf.
        self._has_rollback = self.how != "vmap" and lanes[0].options.on_nan in ("stop", "skip")
        self._machine = self._make_machine(is_guarded=False)
        self._guarded: machine.Machine | None = None

    def _make_machine(self, *, is_guarded: bool) -> machine.Machine:
        if self.how == "vmap":
            return machine.Machine(self._last_steps, self._last_steps, self.how)
        steps = []
        for lane in self._lanes:
            options = lane.options
            if self._has_rollback and not is_guarded:
                options = dataclasses.replace(options, on_nan="count")
            steps.append(lane.trace(options, loss_only=True))
        return machine.Machine(steps, self._last_steps, self.how)

    def end(self, runner: Runner) -> None:
        """Runs a lane no longer; the programs stay as they are."""
        self._ended.add(self._runners.index(runner))

    def advance(self, runner: Runner, target: int) -> Segment | None:
        """Returns the steps of one lane up to `target`, which may have been run before."""
        own = self._runners.index(runner)
        if own not in self._pending:
            self._run(own, target)
        if own not in self._pending:
            return None  # The data has ended.
        leaves, outputs, n_steps, position = self._pending.pop(own)
        runner.adopt(leaves, outputs, n_steps, position)
        output = runner.codec.unflatten_output(outputs)
        return Segment(output=output, has_grads=False, n_steps=n_steps, batch=None)

    def _run(self, own: int, target: int) -> None:
        """Runs all lanes that are at the step of one of them."""
        step = self._runners[own].step
        active = [
            i
            for i, runner in enumerate(self._runners)
            if i not in self._ended and i not in self._pending and runner.step == step
        ]
        before = [runner.leaves for runner in self._runners]
        run = _Run(self, active, target)
        states, outputs = run.all_steps(before, self._machine)
        if not run.n_steps:
            return
        results = self._unloaded(states, outputs)
        if self._has_rollback:
            bad = [i for i in active if self._is_bad(i, results[i][0])]
            if bad:
                self._guarded = self._guarded or self._make_machine(is_guarded=True)
                rerun = _Run(self, bad, run.step, can_stop=False)
                states, outputs = rerun.all_steps(before, self._guarded)
                again = self._unloaded(states, outputs)
                results = [again[i] if i in bad else result for i, result in enumerate(results)]
        for i in active:
            leaves, own_outputs = results[i]
            self._pending[i] = leaves, own_outputs, run.n_steps, run.positions[i]

    def _unloaded(self, states: Any, outputs: Any) -> list[tuple[Leaves, Outputs]]:
        n = len(self._lanes)
        lanes = machine.unload(states, n, self.how), machine.unload(outputs, n, self.how)
        return list(zip(*lanes, strict=True))

    def _is_bad(self, i: int, leaves: Leaves) -> bool:
        """Whether a lane met NaN or Inf in steps without a guard."""
        runner, on_nan = self._runners[i], self._lanes[i].options.on_nan
        n_bad, after = runner.state.health.n_bad, runner.codec.unflatten(leaves)
        return not nonfinite.all_finite_since(n_bad, after, on_nan)

    @property
    def n_lanes(self) -> int:
        """The number of lanes."""
        return len(self._lanes)

    @property
    def runners(self) -> Sequence[Runner]:
        """The runners of the lanes."""
        return self._runners


class _Run:
    """The steps of some lanes of a group between two checkpoints."""

    def __init__(
        self, group: LaneGroup, active: Sequence[int], target: int, *, can_stop: bool = True
    ):
        self._group, self._active, self._target = group, active, target
        self._can_stop = can_stop
        runners = group.runners
        self._start = self.step = runners[active[0]].step
        self._leaders: list[int] = []
        self._streams = np.zeros(group.n_lanes, np.int32)
        self._is_active = np.zeros(group.n_lanes, bool)
        self._is_active[list(active)] = True
        for i in active:
            same = (k for k, n in enumerate(self._leaders) if _is_same_data(runners[n], runners[i]))
            stream = next(same, len(self._leaders))
            if stream == len(self._leaders):
                self._leaders.append(i)
            self._streams[i] = stream
        self._is_exhausted = False
        self._before = {i: runners[i].feed.state for i in active}

    @property
    def n_steps(self) -> int:
        """How many steps ran."""
        return self.step - self._start

    @property
    def positions(self) -> dict[int, Any]:
        """The data position after the steps, by lane."""
        runners = self._group.runners
        after = [runners[i].feed.state for i in self._leaders]
        return {i: after[self._streams[i]] for i in self._active}

    def all_steps(self, lanes: Sequence[Leaves], runs: machine.Machine) -> tuple[Any, Any]:
        """Runs up to the target, or less if the data ends or a stop is requested."""
        runner = self._group.runners[self._active[0]]
        self._move_back()
        states, outputs = machine.load(lanes, self._group.how), None
        ahead = lookahead.Lookahead()
        batches = self._draw()
        while batches is not None:
            if runner.before_dispatch is not None:
                runner.before_dispatch(self.step)
            following = None
            is_stopping = self._can_stop and runner.should_stop()
            if self.step + 1 < self._target and not is_stopping:
                following = self._draw()
            is_end = following is None and self._is_exhausted
            states, outputs = runs.run(
                states,
                batches,
                streams=self._streams,
                is_active=self._is_active,
                is_last=is_end or self.step + 1 == self._target,
            )
            ahead.sent(jax.tree.leaves(outputs)[0])
            self.step += 1
            batches = following
        return states, outputs

    def _move_back(self) -> None:
        """Returns to the position before the steps, for a second run."""
        for i in self._leaders:
            feed = self._group.runners[i].feed
            if feed.state != self._before[i]:
                feed.restore(self._before[i])

    def _draw(self) -> list[Any] | None:
        try:
            return [self._group.runners[i].feed.next() for i in self._leaders]
        except StopIteration:
            self._is_exhausted = True
            return None


def _is_same_data(a: Runner, b: Runner) -> bool:
    """Whether two lanes read the same batches: same position, same next batch."""
    if a.feed.state is None or a.feed.state != b.feed.state:
        return False
    pairs = zip(*(jax.tree.leaves(runner.feed.peek()) for runner in (a, b)), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def join(loops: Sequence[TrainLoop], how: machine.How = "auto") -> list[list[int]]:
    """Groups loops by their programs; those of one group run together from now on.

    Args:
        loops: The loops; they run on one device.
        how: How the lanes of a group run.

    Returns:
        The indices of the loops of each group. A loop that is like no other runs by itself.
    """
    groups: list[tuple[list[int], list[_Lane], list[constants.Traced]]] = []
    for i, loop in enumerate(loops):
        lane = _Lane(loop)
        traced = lane.trace(lane.options, loss_only=False)
        for indices, lanes, programs in groups:
            # A shared program has the shapes of the first batch.
            has_one_shape = all(x.runner.feed.has_one_shape for x in (lane, lanes[0]))
            if has_one_shape and lane.limits == lanes[0].limits and traced.is_like(programs[0]):
                indices.append(i)
                lanes.append(lane)
                programs.append(traced)
                break
        else:
            groups.append(([i], [lane], [traced]))
    for _, lanes, programs in groups:
        if len(lanes) > 1:
            group = LaneGroup(lanes, programs, how)
            for lane in lanes:
                lane.runner.group = group
    return [indices for indices, _, _ in groups]
