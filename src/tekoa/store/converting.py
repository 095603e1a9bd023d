"""Checkpoints turned from one format into another."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tekoa.store import commit, loading, steps
from tekoa.store import lease as lease_lib


def convert(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    layout: steps.Layout,
    step: int | None = None,
    axes: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes a checkpoint into another directory, in the format asked for.

    Args:
        source: What `load` takes.
        directory: A directory of steps; made if needed.
        layout: 'tekoa' or 't5x'.
        step: This step of the source; None takes the newest good one.
        axes: For 't5x': by item, a tree of axes as `t5x.write` takes it.

    Returns:
        The directory of the new step. Values, dtypes, names and meta are the same.

    Raises:
        errors.StoreError: If there is no usable source, or the step exists already.
    """
    opened = loading.open_newest(source, step=step)
    values = opened.read(opened.index.leaves, {})

    def write(tmp: pathlib.Path) -> None:
        steps.write_step(tmp, opened.index, values, layout=layout, axes=axes or {})
        steps.finish_step(tmp, opened.index, layout=layout)

    facts = {"meta_hash": commit.meta_hash(opened.index.meta)}
    with lease_lib.held(directory) as lease:
        return commit.commit(lease, opened.index.step, write, layout=layout, facts=facts)
