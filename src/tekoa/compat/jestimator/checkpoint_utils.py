"""The names of JEstimator's `checkpoint_utils` that programs use."""

import os
import pathlib

from tekoa.store.commit import paths
from tekoa.store.formats import step as step_lib


def latest_ckpt_path(
    model_dir: str | None = None, init_ckpt_path: str | None = None, prefix: str = "checkpoint_"
) -> tuple[str | None, bool]:
    """Returns the checkpoint to start from, and whether it is in `model_dir`.

    Args:
        model_dir: The directory of the run.
        init_ckpt_path: A checkpoint; one inside `model_dir` is preferred to the newest there, any
            other is used if there is none.
        prefix: Must be 'checkpoint_', the only prefix there is.

    Raises:
        ValueError: If the prefix is another one.
    """
    if prefix != "checkpoint_":
        raise ValueError(f"Checkpoints are named checkpoint_<step>; got the prefix {prefix!r}.")
    if model_dir is not None:
        directory = pathlib.Path(model_dir).expanduser().absolute()
        if init_ckpt_path is not None:
            path = pathlib.Path(init_ckpt_path).expanduser().absolute()
            if path.is_relative_to(directory):
                return init_ckpt_path, True
        if ckpts := sorted_checkpoints(directory):
            return ckpts[-1], True
    return init_ckpt_path, False


def sorted_checkpoints(ckpt_dir: str | os.PathLike[str], prefix: str = "checkpoint_") -> list[str]:
    """Returns the paths of all checkpoints in a directory, the oldest first."""
    del prefix
    steps = (paths.step_dir(ckpt_dir, step) for step in paths.list_steps(ckpt_dir))
    return [str(path) for path in steps if step_lib.is_committed(path)]


def last_evaluated_ckpt(last_eval_path: str) -> str | None:
    """Returns the checkpoint that an evaluator noted last, or None."""
    path = pathlib.Path(last_eval_path)
    return path.read_text() if path.exists() else None


def last_score(last_score_path: str) -> float:
    """Returns the best score that an evaluator stored, or minus infinity."""
    path = pathlib.Path(last_score_path)
    text = path.read_text() if path.exists() else ""
    return float(text or "-inf")
