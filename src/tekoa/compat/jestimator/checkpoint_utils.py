"""The names of JEstimator's `checkpoint_utils` that programs use."""

import logging
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from tekoa.core import trees
from tekoa.estimator.jestimator.states import TrainState
from tekoa.store.commit import paths
from tekoa.store.formats import step as step_lib
from tekoa.store.transfer import warm_start

_log = logging.getLogger("tekoa")


def partial_restore(
    state: TrainState, ckpt_dict: Mapping[str, Any], load_step: bool = False
) -> TrainState:
    """Returns a state with the parameters of a T5X checkpoint, by name.

    Parameters that are not in the checkpoint are kept, and reported. Where the number of rows
    differs, such as after a vocabulary has grown, the rows that both have in common are loaded.

    Args:
        state: The initial state.
        ckpt_dict: What `tekoa.store.t5x.read(path)` returns. Other collections of the model are
            loaded from its `flax_mutables`, if there are any.
        load_step: Whether to load the number of the step too.

    Raises:
        ValueError: If a parameter differs in another axis than the first.
    """
    stored = trees.named_leaves(ckpt_dict["target"])
    for name, leaf in trees.named_leaves(state.params).items():
        if name in stored and jnp.shape(stored[name])[1:] != jnp.shape(leaf)[1:]:
            raise ValueError(
                f"Parameter {'/'.join(name)!r} has shape {jnp.shape(stored[name])} in the "
                f"checkpoint, but {jnp.shape(leaf)} in the model; only the first axis may differ."
            )
    params, report = warm_start.warm_start(
        state.params, ckpt_dict["target"], slice_shapes=True, cast=True
    )
    for row in report.rows:
        if row.outcome in ("missing", "loaded in part"):
            _log.warning("%s: %s in the checkpoint. %s", row.name, row.outcome, row.detail)
    state = state.replace(params=params)
    if "flax_mutables" in ckpt_dict:
        state = state.replace(_vars=ckpt_dict["flax_mutables"])
    if load_step:
        state = state.replace(step=jnp.asarray(ckpt_dict["state"]["step"], jnp.int32))
    return state


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


def checkpoints_iterator_from_oldest(
    model_dir: str,
    last_eval_path: str,
    min_interval_secs: float = 0.0,
    last_evaluated: str | None = None,
) -> Iterator[str]:
    """Yields the checkpoints of a run from the second on, and waits for new ones without end.

    Args:
        model_dir: The directory of the run.
        last_eval_path: The file in which each checkpoint is noted before it is yielded.
        min_interval_secs: How long to wait between two looks.
        last_evaluated: Only checkpoints after this one are yielded.
    """
    while True:
        ckpts = sorted_checkpoints(model_dir)[1:]
        if last_evaluated in ckpts:
            ckpts = ckpts[ckpts.index(last_evaluated) + 1 :]
        for path in ckpts:
            if os.path.exists(path):
                last_evaluated = path
                pathlib.Path(last_eval_path).write_text(path)
                yield path
        if not ckpts:
            time.sleep(min_interval_secs)


def last_evaluated_ckpt(last_eval_path: str) -> str | None:
    """Returns the checkpoint that an evaluator noted last, or None."""
    path = pathlib.Path(last_eval_path)
    return path.read_text() if path.exists() else None


def last_score(last_score_path: str) -> float:
    """Returns the best score that an evaluator stored, or minus infinity."""
    path = pathlib.Path(last_score_path)
    text = path.read_text() if path.exists() else ""
    return float(text or "-inf")
