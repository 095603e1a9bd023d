"""`tekoa verify` proves that a run was made by its recorded code on its data.

Segments between two checkpoints, chosen at random, are trained again and compared with the next
checkpoint bit by bit: weights, optimizer state, randomness and data position. Without training
anything, the command also follows the chain of checkpoints: each one names the digest of the one
before and of the code.

Flags:
  --fraction=F  which part of the steps to train again at most (default: 0.05; at least one segment)
  --seed=N      choose the same segments again; by default they cannot be foreseen

Exit codes: 0 if everything agrees, 65 if something differs.

Example: tekoa verify runs/mnist --fraction=0.2
"""

import contextlib
import dataclasses
import itertools
import os
import random
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.replay import arguments as arguments_lib
from tekoa.estimator.replay.replay import difference_from_stored
from tekoa.estimator.replay.segment import MakeLoop, OtherDataError, Replayer, ReplayError
from tekoa.store import errors
from tekoa.store.commit import manifest
from tekoa.store.formats import step as steps
from tekoa.store.mirror import mirror

USAGE = "tekoa verify RUN [--fraction=F] [--seed=N]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What was checked, and what is wrong.

    Attributes:
        segments: The segments that were trained again: first and last step.
        left_out: Segments that are too long to be chosen.
        n_steps: Steps between the first and the last checkpoint.
        faults: What does not agree, one line each.
        seed: Chooses the same segments again.
    """

    segments: list[tuple[int, int]]
    left_out: list[tuple[int, int]]
    n_steps: int
    faults: list[str]
    seed: int

    @property
    def is_good(self) -> bool:
        """Whether everything agrees."""
        return not self.faults


def verify(
    directory: str | os.PathLike[str],
    make_loop: MakeLoop | None = None,
    *,
    fraction: float = 0.05,
    seed: int | None = None,
) -> Verification:
    """Trains random segments of a run again and compares them with its checkpoints.

    Args:
        directory: The directory of the run, which does not change.
        make_loop: As for `replay`.
        fraction: Which part of the steps to train again at most; at least one segment.
        seed: Chooses the segments; by default they cannot be foreseen.

    Raises:
        ReplayError: If there are no two checkpoints to compare.
    """
    return _verify(Replayer(directory, make_loop), fraction, seed)


def _verify(replayer: Replayer, fraction: float, seed: int | None) -> Verification:
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    codes, damaged = _leave_out_damaged(replayer)
    segments = list(_segments(replayer))
    if not damaged:
        replayer.check_stored()
    if not segments and damaged:
        faults = list(damaged.values())
        return Verification(segments=[], left_out=[], n_steps=0, faults=faults, seed=seed)
    if not segments:
        raise ReplayError(
            f"{mirror.shown(replayer.directory)}: there is nothing to verify: a segment needs "
            f"two checkpoints, and the stored steps are {sorted(replayer.stored)}. Train further."
        )
    faults = [*damaged.values(), *_chain_faults(replayer, damaged), *_code_faults(replayer, codes)]
    limit = _limit(segments, fraction)
    chosen = _choose(segments, limit, seed)
    for first, last in chosen:
        faults += _segment_faults(replayer, first, last)
    n_steps = sum(last - first for first, last in segments)
    too_long = [(first, last) for first, last in segments if last - first > limit]
    return Verification(
        segments=chosen, left_out=too_long, n_steps=n_steps, faults=faults, seed=seed
    )


def run_verify(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    parser = arguments_lib.Arguments("verify", "RUN")
    parser.add_argument("--fraction", type=arguments_lib.fraction, default=0.05)
    parser.add_argument("--seed", type=int)
    parsed = parser.parse(arguments)
    replayer = Replayer(parsed.RUN)
    newest = max(replayer.stored, default=0)
    arguments_lib.print_differences(replayer.directory, replayer.differences(newest))
    with arguments_lib.compiled_once():
        result = _verify(replayer, parsed.fraction, parsed.seed)
    n_checked = sum(last - first for first, last in result.segments)
    print(f"Trained {n_checked} of {result.n_steps} steps again (--seed={result.seed}):")
    for first, last in result.segments:
        print(f"  steps {first} to {last}")
    if result.left_out:
        segments = ", ".join(f"{first} to {last}" for first, last in result.left_out)
        print(
            f"Not trained again: steps {segments}; without a checkpoint in between, each would be "
            f"more than --fraction={parsed.fraction} of the run."
        )
    for fault in result.faults:
        print(fault)
    if result.is_good:
        print("All bits agree: this code on this data made these steps.")
        return ExitCode.SUCCESS
    return ExitCode.DAMAGED


def _leave_out_damaged(replayer: Replayer) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Removes the steps that cannot be read from those to verify.

    Returns:
        The code that each step names, and what is wrong with those that cannot be read.
    """
    codes, faults = {}, {}
    for step, path in sorted(replayer.stored.items()):
        try:
            with replayer.noticing_removals():
                codes[step] = steps.open_step(path).index.meta.get("code", {})
        except errors.StoreError as error:
            faults[step] = str(error)
            del replayer.stored[step]
    return codes, faults


def _segments(replayer: Replayer) -> Iterator[tuple[int, int]]:
    """Yields the pairs of neighbouring steps that can be compared."""
    stored = sorted(replayer.stored)
    if stored and stored[0] > 0 and replayer.starts_from_scratch:
        stored = [0, *stored]
    yield from itertools.pairwise(stored)


def _limit(segments: Sequence[tuple[int, int]], fraction: float) -> float:
    """Returns how many steps a segment may have to be chosen.

    If a segment is more than the requested part of all steps, one of the shorter half is chosen,
    not always the shortest, which would be known in advance. A long one, such as that before the
    first checkpoint that was kept, would take most of the time of the run.
    """
    lengths = [last - first for first, last in segments]
    requested = fraction * sum(lengths)
    return requested if min(lengths) <= requested else statistics.median_low(lengths)


def _choose(segments: Sequence[tuple[int, int]], limit: float, seed: int) -> list[tuple[int, int]]:
    """Chooses segments at random that have up to `limit` steps together."""
    shuffled = list(segments)
    random.Random(seed).shuffle(shuffled)
    chosen: list[tuple[int, int]] = []
    for first, last in shuffled:
        if last - first <= limit:
            chosen.append((first, last))
            limit -= last - first
    return sorted(chosen)


def _segment_faults(replayer: Replayer, first: int, last: int) -> list[str]:
    try:
        with replayer.noticing_removals():
            difference = difference_from_stored(replayer, replayer.run(first, last))
    except (errors.StoreError, OtherDataError) as error:
        return [f"Steps {first} to {last}: {error}"]
    return [f"Steps {first} to {last}: {difference}"] if difference else []


def _chain_faults(replayer: Replayer, damaged: Container[int]) -> Iterator[str]:
    """Yields where a checkpoint does not name the one before it."""
    sealed: dict[int, manifest.Manifest] = {}
    for step, path in sorted(replayer.stored.items()):
        with contextlib.suppress(FileNotFoundError):  # Written by another program.
            sealed[step] = manifest.read(path)
    # Permanent copies, in a directory of their own, are fewer: steps between them are not missing.
    own_steps = [step for step in sealed if replayer.stored[step].parent == replayer.directory]
    for step in own_steps:
        before = sealed[step].facts.get("previous")
        if before is None:
            continue
        named, digest = before["step"], before["digest"]
        if named in sealed:
            if sealed[named].digest != digest:
                yield (
                    f"Step {step} was written after another step {named} than the one stored: "
                    f"that one was exchanged or changed."
                )
        elif named not in damaged and any(n < named for n in own_steps):
            yield f"Step {named} is missing: step {step} was written after it."


def _code_faults(replayer: Replayer, codes: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the steps that were made by other code than the record says."""
    if replayer.record is None:
        return
    for step, code in codes.items():
        recorded = replayer.record.start_of(step).facts.get("sources", {})
        others = {copy for copy in code.values() if copy not in recorded.values()}
        if others:
            yield f"Step {step} was made by {sorted(others)}, and run.json says {recorded}."
