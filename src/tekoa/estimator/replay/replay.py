"""`tekoa replay` runs some steps of a run again, from its nearest checkpoint.

The model, the settings and the data are those of the record (`run.json`). The run itself does not
change. The command prints the loss of the segment and says whether the result has the same bits as
the checkpoint of that step, if there is one.

Flags:
  --from=STEP  where to start: a stored step, or one that is replayed first
  --to=STEP    where to end; by default the next stored step
  --out=DIR    save the result as a checkpoint in a new directory

Example: tekoa replay runs/mnist --from=900 --to=1000
"""

import os
import pathlib
from collections.abc import Sequence

from tekoa.core import files
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.replay import arguments as arguments_lib
from tekoa.estimator.replay.segment import MakeLoop, Replayer, ReplayError
from tekoa.extensions import checkpoint_files
from tekoa.loop.checkpoint import Checkpoint, as_summary
from tekoa.store.formats import step as steps
from tekoa.store.mirror import mirror
from tekoa.store.read import compare
from tekoa.store.read import restore as restore_lib

USAGE = "tekoa replay RUN [--from=STEP] [--to=STEP] [--out=DIR]"


def replay(
    directory: str | os.PathLike[str],
    make_loop: MakeLoop | None = None,
    *,
    start: int | None = None,
    stop: int | None = None,
) -> Checkpoint:
    """Runs some steps of a run again and returns the last checkpoint; the run does not change.

    Args:
        directory: The directory of the run.
        make_loop: For a run that was not made by `tekoa train`: `make_loop(read)` returns its
            `TrainLoop`, with `read(model)` in place of the model.
        start: Where to start; by default the last stored step before `stop`.
        stop: Where to end; by default the newest stored step.

    Raises:
        ReplayError: If the segment cannot be replayed; it says why.
    """
    replayer = Replayer(directory, make_loop)
    first, last = _limits(replayer, start, stop)
    with replayer.noticing_removals():
        if first in replayer.stored or first == 0:
            return replayer.run(first, last)
        *_, checkpoint = replayer.states(replayer.nearest(first), [first, last])
        return checkpoint


def run_replay(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code.

    Raises:
        UsageError: If an argument is wrong, or the segment cannot be replayed.
    """
    parser = arguments_lib.Arguments("replay", "RUN")
    parser.add_argument("--from", dest="start", type=arguments_lib.step)
    parser.add_argument("--to", dest="stop", type=arguments_lib.step)
    parser.add_argument("--out")
    parsed = parser.parse(arguments)
    out = None if parsed.out is None else _new_directory(parsed.out)
    replayer = Replayer(parsed.RUN)
    first, last = _limits(replayer, parsed.start, parsed.stop)
    arguments_lib.print_differences(replayer.directory, replayer.differences(last))
    with arguments_lib.compiled_once():
        checkpoint = replay(parsed.RUN, start=first, stop=last)
    metrics = as_summary(checkpoint).metrics.get("train", {})
    loss = f", loss {metrics['loss']:.6g}" if "loss" in metrics else ""
    print(f"Replayed steps {first} to {last}{loss}.")
    if last in replayer.stored:
        with replayer.noticing_removals():
            difference = difference_from_stored(replayer, checkpoint)
        same = f"The result has the same bits as {mirror.shown(replayer.stored[last])}."
        print(difference or same)
    elif last > (end := max(replayer.stored)):
        print(f"The last checkpoint of the run is step {end}: later ones may not be part of it.")
    if out is not None:
        _save(out, checkpoint)
    return 0


def difference_from_stored(replayer: Replayer, checkpoint: Checkpoint) -> str | None:
    """Returns how a replayed checkpoint differs from the stored one; None if it does not."""
    path = replayer.stored[checkpoint.step]
    items = checkpoint_files.items_of(checkpoint.state)
    opened = steps.open_step(path)
    loaded = restore_lib.restore_step(opened, items, zeros_if_missing=("sums",))
    difference = compare.first_difference(items, loaded.items)
    if difference is not None:
        return f"The replayed step {checkpoint.step} is not the stored one. {difference}"
    position = loaded.meta.get("data_state")
    if position is not None and checkpoint.data_state != position:
        return (
            f"The replayed step {checkpoint.step} is at another position in the data: "
            f"{checkpoint.data_state}, stored is {position}."
        )
    return None


def _limits(replayer: Replayer, start: int | None, stop: int | None) -> tuple[int, int]:
    """Returns the first and the last step of the segment to replay."""
    replayer.check_stored()
    stored = sorted(replayer.stored)
    if stop is None:
        later = [n for n in stored if start is not None and n > start]
        stop = later[0] if later else stored[-1]
    if start is None:
        start = replayer.nearest(stop - 1) if stop else 0
    if start >= stop:
        raise ReplayError(
            f"{mirror.shown(replayer.directory)}: nothing to replay from step {start} to "
            f"step {stop}. Stored steps: {stored}. Set --from to an earlier step than --to."
        )
    return start, stop


def _new_directory(out: str) -> pathlib.Path:
    directory = files.local_path(out)
    if directory.exists():
        raise UsageError(f"--out={directory} exists. Name a new directory.")
    return directory


def _save(directory: pathlib.Path, checkpoint: Checkpoint) -> None:
    writer = checkpoint_files.CheckpointFileWriter(directory, run_file=False)
    writer(checkpoint)
    writer.close()
    print(f"Saved in {directory}.")
