"""`tekoa train --again=RUN`: the flags of a run, from its record. Imports no JAX."""

import dataclasses
import itertools
import pathlib
import sys
from typing import Any

from tekoa.estimator.cli.run_config import RunConfig, UsageError
from tekoa.estimator.replay.record import NOT_REPEATED, RunRecord, Start, read_record
from tekoa.store.mirror import mirror


def repeat(config: RunConfig) -> RunConfig:
    """Returns the flags of the run that `--again` names; flags of the command line win.

    The new run is in `RUN-again` unless `--model_dir` is set. A model file that has changed since
    is replaced by the copy that the run keeps.

    Raises:
        UsageError: If there is no record of such a run.
        errors.DamagedError: If the record is damaged.
    """
    run = mirror.fetched(config.again or "", steps="none").absolute()
    try:
        record = read_record(run)
    except UsageError as error:
        raise UsageError(f"--again={config.again}: {error}") from None
    last = record.starts[-1]
    repeated = {name: value for name, value in last.flags().items() if name not in NOT_REPEATED}
    set_flags = config.set_flags | repeated.keys()
    shown = mirror.shown(run)
    repeated |= {"random_seed": last.seed, "model_dir": f"{shown}-again"}
    new_config = config.with_defaults(repeated)
    new_dir = new_config.model_dir or ""
    if new_dir == shown or pathlib.Path(new_dir).absolute() == run:
        raise UsageError(f"--model_dir={new_config.model_dir} is the run itself. Name another one.")
    _print_notes(record)
    return dataclasses.replace(
        new_config,
        overrides={**last.overrides, **config.overrides},
        set_flags=set_flags | {"random_seed", "model_dir"},
    )


def _print_notes(record: RunRecord) -> None:
    """Prints what may make the result differ from that of the run."""
    starts, shown = record.starts, mirror.shown(record.directory)
    changed = [
        after.step
        for before, after in itertools.pairwise(starts)
        if any(before.facts.get(name) != after.facts.get(name) for name in ("settings", "sources"))
        or _lasting(before) != _lasting(after)
    ]
    if changed:
        steps = ", ".join(map(str, changed))
        _print(f"{shown} changed its settings at step {steps}: using the last ones from the start.")
    for line in starts[-1].differences():
        _print(f"Not as in {shown}: {line}")


def _lasting(start: Start) -> dict[str, Any]:
    return {n: value for n, value in start.facts["flags"].items() if n not in NOT_REPEATED}


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
