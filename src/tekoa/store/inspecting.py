"""What is in a directory of checkpoints, found without JAX."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from tekoa.store import errors, manifest, names


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInfo:
    """One step as seen from outside.

    Attributes:
        step: The step.
        path: Its directory.
        layout: 'tekoa', 't5x' or 'unknown'.
        n_bytes: Size of its files.
        problem: Why it cannot be used; empty if nothing was found.
        meta: The JSON values stored with it.
        metrics: The numbers that retention compares.
    """

    step: int
    path: pathlib.Path
    layout: str
    n_bytes: int
    problem: str
    meta: dict[str, Any]
    metrics: dict[str, float]


def inspect(
    directory: str | os.PathLike[str], *, verify: manifest.Verify = "size"
) -> list[StepInfo]:
    """Describes every step of a directory, lowest first.

    Args:
        directory: A directory of steps, or one step.
        verify: How closely to look at the files.
    """
    path = pathlib.Path(directory).absolute()
    step = names.parse_step(path.name)
    if step is not None:
        return [_inspect_step(path, step, verify)]
    return [
        _inspect_step(names.step_dir(path, step), step, verify) for step in names.list_steps(path)
    ]


def _inspect_step(path: pathlib.Path, step: int, verify: manifest.Verify) -> StepInfo:
    layout, problem, index = "unknown", "", {}
    try:
        sealed = manifest.read(path)
        layout = sealed.layout
        manifest.check(path, sealed, verify)
        index = _index(path)
    except FileNotFoundError:
        if (path / names.T5X).is_file():
            layout = "t5x"
        else:
            problem = "has no manifest"
    except errors.DamagedError as error:
        problem = str(error)
    n_bytes = sum(file.lstat().st_size for file in path.rglob("*"))
    return StepInfo(
        step=step,
        path=path,
        layout=layout,
        n_bytes=n_bytes,
        problem=problem,
        meta=index.get("meta", {}),
        metrics=index.get("metrics", {}),
    )


def _index(path: pathlib.Path) -> dict[str, Any]:
    # A step that `t5x.write` made has a manifest and no index.
    file = path / names.INDEX
    return json.loads(file.read_text()) if file.exists() else {}
