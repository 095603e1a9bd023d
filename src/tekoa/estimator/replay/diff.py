"""`tekoa diff` finds where two runs part, and why.

It compares the records (settings, versions, data), then the checkpoints that both runs have, and
then trains both runs again, step by step, from the last checkpoint with the same bits. Within the
first step that differs it looks at the batch, the loss, the gradients and the update.

Exit codes: 0 if the runs have the same bits, 1 if they part.

Example: tekoa diff runs/a runs/b
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tekoa.core import trees
from tekoa.core.messages import some_of
from tekoa.estimator.replay import arguments as arguments_lib
from tekoa.estimator.replay import replay
from tekoa.estimator.replay.segment import MakeLoop, Replayer
from tekoa.extensions import checkpoint_files, run_record
from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.train import TrainLoop
from tekoa.store.formats import step as steps
from tekoa.store.mirror import mirror
from tekoa.store.read import compare, load

USAGE = "tekoa diff A B"
# Flags that do not change a step, or that the settings show.
_IGNORED = {"model_dir", "random_seed", "module_imp", "overrides", "max_train_steps"}
# Parts of the state that decide how training goes on; the others count and report.
_ITEMS = ("model_params", "model_state", "optimizer_state", "average", "carry", "rng")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDiff:
    """Where two runs part.

    Attributes:
        settings: What differs between the settings that produced `step`, one line each.
        n_equal: The last step with the same bits, as far as it is known.
        step: The first step that differs; None if no difference was found.
        where: What differs first in that step: "initial state", "batch", "loss", "gradient",
            "update" or "checkpoint"; empty if the runs agree.
        detail: The first array that differs.
        cause: The likely cause, in words.
        n_replays: How many segments were trained again.
    """

    settings: list[str]
    n_equal: int
    step: int | None = None
    where: str = ""
    detail: str = ""
    cause: str = ""
    n_replays: int = 0


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    make_a: MakeLoop | None = None,
    make_b: MakeLoop | None = None,
) -> RunDiff:
    """Finds the first step in which two runs differ, and why. Neither run is changed.

    Args:
        a: The directory of a run.
        b: The directory of another run.
        make_a: Makes the loop of the first run, as for `replay`.
        make_b: Makes the loop of the second run.

    Raises:
        ReplayError: If the segment in which they part cannot be replayed.
    """
    pair = Replayer(a, make_a), Replayer(b, make_b)
    for replayer in pair:
        replayer.check_stored()
    with pair[0].noticing_removals(), pair[1].noticing_removals():
        return _compare(*pair)


def _compare(a: Replayer, b: Replayer) -> RunDiff:
    """Compares the checkpoints of two runs, and trains them again from where they part."""
    common = sorted(a.stored.keys() & b.stored.keys())
    n = _first_unequal(common, lambda step: _stored_difference(a, b, step) is None)
    if n == len(common) and common:
        return RunDiff(settings=_settings(a, b, common[-1]), n_equal=common[-1])
    if common and common[n] == 0:
        return _initial_state(a, b)
    start = common[n - 1] if n else 0
    # Without a common checkpoint the runs are compared up to the end of the shorter one.
    last = common[n] if common else min(max(a.stored), max(b.stored))
    return _replayed(a, b, start, last)


def run_diff(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    parsed = arguments_lib.Arguments("diff", "A", "B").parse(arguments)
    with arguments_lib.compiled_once():
        result = diff(parsed.A, parsed.B)
    if result.settings:
        print("The records differ:")
        for line in result.settings:
            print(f"  {line}")
    else:
        print("The records agree.")
    if result.step is None:
        print(f"The runs have the same bits up to step {result.n_equal}.")
        return 0
    if result.step:
        print(f"The runs have the same bits up to step {result.n_equal}.")
    print(f"They part at step {result.step}, in the {result.where}. {result.detail}")
    print(f"Likely cause: {result.cause}")
    return 1


def _settings(a: Replayer, b: Replayer, step: int) -> list[str]:
    """Describes how the starts that produced a step differ, one line each."""
    if a.record is None or b.record is None:
        return []
    starts = [record.start_of(step) for record in (a.record, b.record)]
    facts = [
        {
            **start.facts,
            "flags": {n: v for n, v in start.facts["flags"].items() if n not in _IGNORED},
            "sources": {pathlib.Path(p).name: c for p, c in start.facts["sources"].items()},
        }
        for start in starts
    ]
    seeds = [start.seed for start in starts]
    seed_lines = [f"random seed: {seeds[0]} -> {seeds[1]}"] if seeds[0] != seeds[1] else []
    models = [start.facts["model"] for start in starts]
    model_lines = [f"model: {models[0]} -> {models[1]}"] if models[0] != models[1] else []
    return seed_lines + model_lines + run_record.changes(*facts)


def _first_unequal(common: Sequence[int], is_equal: Callable[[int], bool]) -> int:
    """Returns the index of the first step that differs, by bisection; runs do not meet again."""
    low, high = 0, len(common)
    while low < high:
        middle = (low + high) // 2
        if is_equal(common[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def _stored_difference(a: Replayer, b: Replayer, step: int) -> str | None:
    """Returns how the checkpoints of a step differ; None if they do not."""
    items = []
    for replayer in (a, b):
        opened = steps.open_step(replayer.stored[step])
        names = [name for name in _ITEMS if name in opened.index.items]
        items.append(load.load_step(opened, items=names))
    return _first_difference(*items)


def _initial_state(a: Replayer, b: Replayer) -> RunDiff:
    settings = _settings(a, b, 0)
    seeds = [line for line in settings if line.startswith("random seed")]
    return RunDiff(
        settings=settings,
        n_equal=-1,
        step=0,
        where="initial state",
        detail=_stored_difference(a, b, 0) or "",
        cause=_because("the model or its initial weights differ", seeds or settings),
    )


def _replayed(a: Replayer, b: Replayer, start: int, last: int) -> RunDiff:
    """Trains both runs again, step by step, up to the first step that differs."""
    before: tuple[Checkpoint, Checkpoint] | None = None
    stops = range(start + 1, last + 1)
    for after in zip(a.states(start, stops), b.states(start, stops), strict=True):
        difference = _state_difference(*after)
        if difference is None:
            before = after
            continue
        if before is None:
            loops = a.loop_at(start), b.loop_at(start)
        else:
            loops = a.resume(before[0]), b.resume(before[1])
        step = after[0].step
        settings = _settings(a, b, step)
        where, detail, cause = _within_step(*loops, difference)
        return RunDiff(
            settings=settings,
            n_equal=step - 1,
            step=step,
            where=where,
            detail=detail,
            cause=_because(cause, settings),
            n_replays=2,
        )
    if last not in a.stored or last not in b.stored:
        return RunDiff(settings=_settings(a, b, last), n_equal=last, n_replays=2)
    return _not_reproduced(a, b, start, last)


def _not_reproduced(a: Replayer, b: Replayer, start: int, last: int) -> RunDiff:
    """The replays agree, so one of the stored steps is not what its record produces."""
    wrong = []
    for replayer in (a, b):
        checkpoint = replayer.run(start, last)
        if replay.difference_from_stored(replayer, checkpoint):
            wrong.append(mirror.shown(replayer.directory))
    return RunDiff(
        settings=_settings(a, b, last),
        n_equal=start,
        step=last,
        where="checkpoint",
        detail=_stored_difference(a, b, last) or "",
        cause=f"trained again, both runs agree: step {last} of {' and '.join(wrong)} is not what "
        "its record produces. It was changed, or made by other code, data or hardware.",
        n_replays=4,
    )


def _state_difference(a: Checkpoint, b: Checkpoint) -> str | None:
    return _first_difference(*(checkpoint_files.items_of(c.state) for c in (a, b)))


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Returns how the items of two states differ; None if they do not."""
    for name in _ITEMS:
        own_a, own_b = a.get(name), b.get(name)
        if jax.tree.structure(own_a) == jax.tree.structure(own_b):
            difference = compare.first_difference({name: own_a}, {name: own_b})
            if difference is not None:
                return str(difference)
        elif name == "model_params":
            only_one = trees.named_leaves(own_a).keys() ^ trees.named_leaves(own_b).keys()
            return f"Only one run has {some_of(sorted(map('/'.join, only_one)))}."
        # Else another optimizer, say; the parameters will differ.
    return None


def _within_step(loop_a: TrainLoop, loop_b: TrainLoop, difference: str) -> tuple[str, str, str]:
    """Returns what differs first within a step, the array, and the likely cause."""
    batches = [{"batch": loop.peek_batch()} for loop in (loop_a, loop_b)]
    batch_difference = compare.first_difference(*batches)
    if batch_difference is not None:
        cause = "the runs train on other data, or in another order"
        return "batch", str(batch_difference), cause
    outputs = []
    for loop in (loop_a, loop_b):
        step = jax.jit(loop.pure_step(on_nan="ignore"))
        outputs.append(step(loop.state, loop.peek_batch())[1])
    parts = {
        "loss": [output.loss for output in outputs],
        "gradient": [output.grads for output in outputs],
    }
    for where, (value_a, value_b) in parts.items():
        part_difference = compare.first_difference({where: value_a}, {where: value_b})
        if part_difference is not None:
            return where, str(part_difference), "the model, the loss or the precision differs"
    return "update", difference, "the optimizer or its rate differs"


def _because(cause: str, settings: Sequence[str]) -> str:
    """Returns the cause with the settings that differ, if there are any."""
    return f"{cause} ({'; '.join(settings)})." if settings else f"{cause}."
