"""Runs steps of a run again, from its checkpoints, without changing anything there.

A step is a function of the state, the batch and the programs that XLA compiled, so a replayed
segment has the bits of the run if the same programs run on the same steps. That is why a segment
is divided where another start of the run took over, and where the run chose its number of steps
per dispatch.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tekoa.core.state import TrainState
from tekoa.data import ChangedDataError, DataError
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file.program import TrainParts, program_of
from tekoa.estimator.modes import assemble
from tekoa.estimator.replay.record import RunRecord, Start, read_record
from tekoa.estimator.run import run as runs
from tekoa.extensions import checkpoint_files
from tekoa.loop import initial_state
from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.engine import dispatch
from tekoa.loop.task import Restored, StateReader
from tekoa.loop.train import TrainLoop
from tekoa.store import errors
from tekoa.store.commit import paths
from tekoa.store.formats import step as steps
from tekoa.store.mirror import mirror
from tekoa.store.read import restore as restore_lib

# `read(model)` stands in for the model of a `TrainLoop`, and starts it where the replay begins.
Read = Callable[[Any], StateReader]
MakeLoop = Callable[[Read], TrainLoop]

_SAVED = "save"


class ReplayError(UsageError):
    """A segment cannot be replayed."""


class OtherDataError(ReplayError):
    """The data is not that of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredReader:
    """Starts a loop from a stored step."""

    target: Any
    path: pathlib.Path

    def restore(self, fresh: TrainState) -> Restored:
        opened = restore_lib.open_together(self.path)
        if opened.index.meta.get("data_state") is None and opened.index.step:
            raise ReplayError(
                f"{mirror.shown(self.path)} has no data position: it was trained on data such as a "
                "generator, which cannot be read again from there. Use a tekoa.data source, a "
                "grain iterator or a list."
            )
        items = checkpoint_files.items_of(fresh)
        loaded = restore_lib.restore_step(opened, items, zeros_if_missing=("sums",))
        return checkpoint_files.restored_of(loaded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MemoryReader:
    """Starts a loop where another one ended; `checkpoint=None` starts from scratch."""

    target: Any
    checkpoint: Checkpoint | None

    def restore(self, fresh: TrainState) -> Restored | None:
        del fresh
        before = self.checkpoint
        if before is None:
            return None
        return Restored(state=before.state, data_state=before.data_state, facts=before.facts)


class Replayer:
    """Runs steps of a run again.

    Args:
        directory: The directory of the run.
        make_loop: For runs of a program of one's own: `make_loop(read)` returns the `TrainLoop`
            of the run, with `read(model)` in the place of its model. By default the loop is built
            from `run.json`, which `tekoa train` writes.

    Attributes:
        directory: The directory of the run, as an absolute path.
        record: What `run.json` says; None with `make_loop`.
        stored: The directory of each committed step, by step.

    Raises:
        UsageError: If there is no such run, or its record does not say how to build the loop.
    """

    def __init__(self, directory: str | os.PathLike[str], make_loop: MakeLoop | None = None):
        self.directory = mirror.fetched(directory, steps="all").absolute()
        if mirror.is_url(directory):
            mirror.fetched(f"{os.fspath(directory).rstrip('/')}/{_SAVED}", steps="all")
        self.record: RunRecord | None = None if make_loop else read_record(self.directory)
        self._make_loop = make_loop
        # The loop that ran the last segment, and the start of the run that it repeats.
        self._last: tuple[TrainLoop, Start | None] | None = None
        self.stored = _stored_steps(self.directory)

    def check_stored(self) -> None:
        """Checks that there is a checkpoint.

        Raises:
            ReplayError: If there is none.
        """
        if not self.stored:
            raise ReplayError(
                f"{mirror.shown(self.directory)} has no complete checkpoint. If it is being "
                "trained, wait for the first one; else train it again."
            )

    @contextlib.contextmanager
    def noticing_removals(self) -> Iterator[None]:
        """Explains errors in the block that come from a run that is still being trained.

        Raises:
            ReplayError: If a checkpoint was removed before it was read.
        """
        try:
            yield
        except (errors.StoreError, FileNotFoundError):
            removed = [step for step, path in self.stored.items() if not steps.is_committed(path)]
            if not removed:
                raise
            raise ReplayError(
                f"{mirror.shown(self.directory)}: checkpoints {removed} were removed before they "
                "were read. If the run is being trained, wait for its end, copy its directory, or "
                "keep more checkpoints with --max_ckpt."
            ) from None

    def nearest(self, step: int) -> int:
        """Returns the last stored step that is not after `step`; 0 if there is none."""
        return max((n for n in self.stored if n <= step), default=0)

    def differences(self, step: int) -> list[str]:
        """Describes what differs between this machine and the start that produced a step."""
        if self.record is None:
            return []
        start = self.record.start_of(step)
        return [*start.differences(), *start.machine_differences()]

    @property
    def starts_from_scratch(self) -> bool:
        """Whether step 0 can be made again, even if it is not stored."""
        if self.record is None:
            return True
        return self.record.starts[0].facts["flags"].get("checkpoint_path") is None

    def states(self, start: int, stops: Sequence[int]) -> Iterator[Checkpoint]:
        """Replays from a stored step, and yields the checkpoint at each of `stops`.

        Args:
            start: A stored step, or 0.
            stops: Steps after it, in order.

        Raises:
            ReplayError: If the segment cannot be replayed.
        """
        loop = self._moved_loop(start)
        changes = self._changes(loop, start, stops[-1])
        for step in sorted({*stops, *changes}):
            checkpoint = _advance(loop, step, is_stop=step in self.stored)
            if step in stops:
                yield checkpoint
            if step in changes:
                n = self._steps_per_dispatch(step, loop.n_steps_per_checkpoint)
                facts = {**checkpoint.facts, "steps_per_dispatch": n}
                loop = self._moved_loop(step, dataclasses.replace(checkpoint, facts=facts))

    def run(self, start: int, stop: int) -> Checkpoint:
        """Replays from a stored step and returns the checkpoint at `stop`."""
        if start == stop:
            return self._loop_at(start).checkpoint()
        (last,) = self.states(start, [stop])
        return last

    def loop_at(self, step: int) -> TrainLoop:
        """Returns the loop of the run at a step, replayed from the nearest stored one."""
        start = self.nearest(step)
        return self._loop_at(step, None if start == step else self.run(start, step))

    def resume(self, checkpoint: Checkpoint) -> TrainLoop:
        """Returns the loop of the run at a checkpoint that `states` yielded."""
        return self._loop_at(checkpoint.step, checkpoint)

    def _changes(self, loop: TrainLoop, start: int, last: int) -> set[int]:
        """Returns the steps within a segment at which the run went on with other programs."""
        changes = set() if self.record is None else {*self.record.changes_between(start, last)}
        choice = self._choice(loop.n_steps_per_checkpoint)
        return changes | ({choice} if start < choice < last else set())

    def _choice(self, every: int) -> int:
        """Returns the step at which the run chose its steps per dispatch."""
        starts = [0] if self.record is None else [start.step for start in self.record.starts]
        for step in itertools.count(every, every):
            began = max([step - every, *(s for s in starts if s < step)])
            if dispatch.is_choice_due(step, step - began) or step > max(self.stored, default=0):
                return step
        raise AssertionError("The loop above has no end.")

    def _steps_per_dispatch(self, step: int, every: int) -> int:
        """Returns the number of steps per dispatch that the run used after a step."""

        def chosen(stored: int) -> int | None:
            return self.facts(stored).get("steps_per_dispatch")

        before = self.nearest(step)
        if before in self.stored and (n := chosen(before)):
            return n
        if step < self._choice(every):
            return 1
        return next(filter(None, map(chosen, sorted(n for n in self.stored if n > step))), 1)

    def facts(self, step: int) -> Mapping[str, Any]:
        """Returns the choices that the run had made at a stored step."""
        return steps.open_step(self.stored[step], verify="none").index.meta.get("facts", {})

    def _moved_loop(self, step: int, checkpoint: Checkpoint | None = None) -> TrainLoop:
        """Returns a loop at a step: that of the last segment if its programs fit, or a new one."""
        start = None if self.record is None else self.record.start_of(step + 1)
        last, self._last = self._last, None  # An error in between may leave it half moved.
        loop = last[0] if last is not None and last[1] is start else None
        with self._data_errors(step):
            if loop is None or not _move(loop, self._reader(step, checkpoint, None)):
                loop = self._loop_at(step, checkpoint)
            has_data_ended(loop)
        self._last = loop, start
        return loop

    def _loop_at(self, step: int, checkpoint: Checkpoint | None = None) -> TrainLoop:
        """Builds the loop at a step: from a checkpoint in memory, a stored step, or scratch."""

        def read(model: Any) -> StateReader:
            return self._reader(step, checkpoint, model)

        with self._data_errors(step):
            loop = self._make_loop(read) if self._make_loop else self._recorded_loop(step, read)
            has_data_ended(loop)  # Reads the next batch: the data may be found only now.
            return loop

    def _reader(self, step: int, checkpoint: Checkpoint | None, model: Any) -> StateReader:
        """Returns what a loop starts from: a checkpoint in memory, a stored step, or scratch."""
        path = self.stored.get(step)
        if checkpoint is not None or (path is None and not step and self.starts_from_scratch):
            return _MemoryReader(target=model, checkpoint=checkpoint)
        if path is None:
            raise ReplayError(
                f"{mirror.shown(self.directory)}: step {step} is not stored, so that nothing can "
                f"be replayed from there. Stored steps: {sorted(self.stored)}."
            )
        return _StoredReader(target=model, path=path)

    @contextlib.contextmanager
    def _data_errors(self, step: int) -> Iterator[None]:
        """Explains errors of the data in the block."""
        try:
            yield
        except ChangedDataError as error:
            # What follows is for those who train: to continue with the other data.
            reason = str(error).partition(". Undo the change")[0]
            raise OtherDataError(
                f"{mirror.shown(self.directory)} was trained on other data. {reason}."
            ) from None
        except DataError as error:
            raise ReplayError(
                f"{mirror.shown(self.directory)} cannot be replayed from step {step}: {error}"
            ) from None

    def _recorded_loop(self, step: int, read: Read) -> TrainLoop:
        assert self.record is not None
        start = self.record.start_of(step + 1)
        run = runs.open_run(start.config())

        def make_reader(parts: TrainParts, data_state: Any) -> StateReader:
            del data_state
            return read(parts.model)

        _, loop = assemble.training_loop(
            run,
            program_of(run, "train"),
            start.seed,
            make_reader=make_reader,
            stdout=False,
        )
        return loop


def _move(loop: TrainLoop, reader: StateReader) -> bool:
    """Moves a loop to what a reader restores; returns whether its programs and data allow it."""
    state = loop.state
    # Without a layout, arrays restored to the device of others would need programs of their own.
    target = jax.eval_shape(lambda: state) if loop.layout is None else state
    restored = reader.restore(target)
    if restored is None or restored.data_state is None or callable(restored.state):
        return False
    facts = restored.facts
    is_known = "steps_per_dispatch" in facts
    if not is_known or facts.get("optimizer") != loop.facts.get("optimizer"):
        return False
    _, runner, options = loop.parts
    state = initial_state.resumed(restored.state, options)
    runner.restart(state, restored.data_state, facts["steps_per_dispatch"])
    return True


def _stored_steps(directory: pathlib.Path) -> dict[int, pathlib.Path]:
    """Returns the committed steps of a run, and its permanent copies."""
    stored = {}
    for folder in (directory / _SAVED, directory):
        for step in paths.list_steps(folder):
            path = paths.step_dir(folder, step)
            if steps.is_committed(path):
                stored[step] = path
    return stored


def _advance(loop: TrainLoop, step: int, *, is_stop: bool) -> Checkpoint:
    """Runs a loop up to a step.

    Args:
        loop: The loop.
        step: The step.
        is_stop: Whether the run itself stopped there, if no regular checkpoint falls on the step.
            A stop runs other programs than a regular checkpoint.
    """
    is_regular = step % loop.n_steps_per_checkpoint == 0 or step == loop.n_steps
    if is_stop and not is_regular:
        n = loop.facts["steps_per_dispatch"] or 1
        loop.stop_flag = _StopBefore(loop, step - n)
    checkpoint = loop.checkpoint()
    try:
        while loop.step < step:
            is_stopping = loop.stop_flag is not None
            checkpoint = loop.next_checkpoint() if is_stopping else next(loop.until(step))
    except StopIteration:
        raise ReplayError(f"The data ended at step {loop.step}, before step {step}.") from None
    loop.stop_flag = None
    if loop.step > step:
        raise ReplayError(
            f"Step {step} is within a group of steps that ran at once, up to step {loop.step}."
        )
    return checkpoint


def has_data_ended(loop: TrainLoop) -> bool:
    """Whether a loop has no batch for its next step.

    Raises:
        DataError: If the data cannot be read.
    """
    try:
        loop.peek_batch()
    except DataError:
        raise
    except ValueError:
        return True
    return False


class _StopBefore:
    """Set once a loop is at a step: it then runs what it has read, and ends."""

    def __init__(self, loop: TrainLoop, step: int):
        self._loop, self._step = loop, step

    def is_set(self) -> bool:
        return self._loop.step >= self._step
