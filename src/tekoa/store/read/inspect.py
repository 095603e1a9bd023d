"""The contents of a directory of checkpoints, listed without JAX."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from tekoa.store import errors
from tekoa.store.commit import manifest, paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Facts about a step that are known without reading its arrays.

    Attributes:
        step: The step number.
        path: Its directory.
        format: 'native', 't5x' or 'unknown'.
        n_bytes: Total size of its files.
        problem: Why it is unusable; empty if no problem was found.
        meta: The JSON values stored with it.
        metrics: The numbers that retention compares.
    """

    step: int
    path: pathlib.Path
    format: str
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
        verify: How thoroughly to check the files.
    """
    path = pathlib.Path(directory).absolute()
    step = paths.parse_step(path.name)
    if step is not None and path.is_dir():
        return [_inspect_step(path, step, verify)]
    return [
        _inspect_step(paths.step_dir(path, step), step, verify) for step in paths.list_steps(path)
    ]


def _inspect_step(path: pathlib.Path, step: int, verify: manifest.Verify) -> StepInfo:
    format, problem, index = "unknown", "", {}
    try:
        sealed = manifest.read(path)
        format = sealed.format
        manifest.check(path, sealed, verify)
        # A step written by `t5x.write` has a manifest but no index.
        if (path / paths.INDEX).exists():
            index = json.loads((path / paths.INDEX).read_text())
    except FileNotFoundError:
        if (path / paths.T5X).is_file():
            format = "t5x"
        else:
            problem = "has no manifest"
    except errors.StoreError as error:
        problem = str(error)
    n_bytes = sum(file.lstat().st_size for file in path.rglob("*"))
    return StepInfo(
        step=step,
        path=path,
        format=format,
        n_bytes=n_bytes,
        problem=problem,
        meta=index.get("meta", {}),
        metrics=index.get("metrics", {}),
    )
