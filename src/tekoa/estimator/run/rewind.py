"""Rewinds a run to one of its older checkpoints.

The newer checkpoints are set aside, not deleted, and so are the best ones among them, with their
scores: they belong to a history that is not continued. `rewind.json` records the request once they
are: the same command then resumes the rewound run, instead of rewinding it at every start.
"""

import json
import os
import pathlib
from typing import Any

from tekoa import hosts
from tekoa.core import files
from tekoa.extensions import run_record
from tekoa.store import errors
from tekoa.store.commit import durable, identity, paths, score, together
from tekoa.store.formats import step as step_lib
from tekoa.store.store import Store
from tekoa.store.transfer import best

REWIND_FILE = "rewind.json"


def is_inside(model_dir: pathlib.Path, path: str | os.PathLike[str]) -> bool:
    """Whether a path is in the directory of a run, so that its checkpoints belong to the run."""
    return files.local_path(path).resolve().is_relative_to(model_dir.resolve())


def is_done(model_dir: pathlib.Path, requested: str) -> bool:
    """Whether the run was last rewound by a command with the same `--checkpoint_path`.

    Raises:
        errors.DamagedError: If `rewind.json` is damaged.
    """

    def read() -> bool:
        record = run_record.read(model_dir / REWIND_FILE)
        return record.get("checkpoint_path") == _relative(model_dir, requested)

    return together.run_on_writer(hosts.current(), "whether the run was rewound", read)


def describe_done(model_dir: pathlib.Path, requested: str) -> str:
    """Returns one line about a run that was rewound by an earlier start."""
    return (
        f"The run was already rewound to {requested} and resumes from its newest checkpoint. "
        f"To rewind it again, remove {model_dir / REWIND_FILE}."
    )


def rewind(checkpoint_store: Store, path: pathlib.Path, requested: str) -> None:
    """Sets aside the checkpoints after a step, and permanent and best copies of them.

    Like every start, the one that rewinds discards later points; early stopping forgets later
    validations, and the evaluator marks later evaluations as superseded.

    A program that is killed meanwhile leaves no record: the next start sets aside the others.

    Args:
        checkpoint_store: The checkpoints of the run.
        path: The step to continue from.
        requested: The `--checkpoint_path` that led to it.
    """
    model_dir = checkpoint_store.directory
    copies = model_dir / "save"

    def list_newer() -> dict[str, Any]:
        source = step_lib.open_step(path, verify="size")
        step = source.index.step
        own = [n for n in paths.list_steps(model_dir) if n >= step]
        # A step of the same number may belong to another history.
        if step in own and _has_digest(paths.step_dir(model_dir, step), source.commit.digest):
            own.remove(step)
        newer_copies = [n for n in paths.list_steps(copies) if n > step]
        return {"step": step, "own": own, "copies": newer_copies}

    newer = together.run_on_writer(hosts.current(), "search for newer steps", list_newer)
    together.run_on_writer(
        hosts.current(),
        "rewinding of the best checkpoints",
        lambda: _set_best_aside(model_dir, newer["step"], requested),
    )
    if newer["copies"]:
        with Store(copies, keep=()) as copy_store:
            _set_aside(copy_store, newer["copies"], requested)
    if newer["own"]:
        _set_aside(checkpoint_store, newer["own"], requested)

    def record() -> None:
        text = json.dumps({"checkpoint_path": _relative(model_dir, requested)})
        durable.replace(model_dir / REWIND_FILE, text.encode())

    together.run_on_writer(hosts.current(), "record of the rewinding", record)


def _set_aside(checkpoint_store: Store, steps: list[int], requested: str) -> None:
    aside = checkpoint_store.set_aside(steps)
    if hosts.current().is_writer:
        _report(steps, aside, requested)


def _set_best_aside(model_dir: pathlib.Path, step: int, requested: str) -> None:
    """Sets aside the best checkpoints after a step: those of validation and of evaluators."""
    for mode, prefix in score.PREFIXES.items():
        for directory in sorted([*model_dir.glob(f"{prefix}*"), *model_dir.glob(f"*/{prefix}*")]):
            steps = [] if directory.is_symlink() else paths.list_steps(directory)
            newer = [n for n in steps if n > step]
            if newer:
                copies = best.BestCopies(directory, mode=mode, keep=len(steps))
                _report(newer, copies.set_aside(newer), requested)


def _report(steps: list[int], aside: pathlib.Path, requested: str) -> None:
    names = ", ".join(map(str, steps))
    print(f"Rewinding to {requested}: steps {names} are set aside in {aside}.", flush=True)


def _has_digest(path: pathlib.Path, digest: str) -> bool:
    try:
        return identity.commit_id(path).digest == digest
    except errors.DamagedError:
        return False


def _relative(model_dir: pathlib.Path, requested: str) -> str:
    """Returns a path inside a run such that it stays the same if the run is moved."""
    return os.path.relpath(files.local_path(requested).resolve(), model_dir.resolve())
