"""The names of JEstimator's `estimator`: train, evaluate and predict from a program.

The flags of the command are defined as flags of absl, which the caller sets before each call.
"""

import dataclasses
import enum
import pathlib
import types
from typing import Any

import jax
import numpy as np
from absl import flags

from tekoa.estimator.cli.flags import config_of, define_flags
from tekoa.estimator.cli.run_config import RunConfig, UsageError
from tekoa.estimator.jestimator.program import LongProgram
from tekoa.estimator.modes import train as train_mode
from tekoa.estimator.modes import watch
from tekoa.estimator.run import layout
from tekoa.estimator.run.run import Run
from tekoa.hosts import signals
from tekoa.sharding.layout import Layout
from tekoa.store.commit import paths
from tekoa.store.formats import index

FLAGS = flags.FLAGS
define_flags(FLAGS)


@enum.unique
class RunMode(enum.Enum):
    """What a program does."""

    EVAL_WAIT = "eval_wait"
    EVAL_ONCE = "eval_once"
    TRAIN = "train"
    PREDICT = "predict"

    @property
    def is_eval(self) -> bool:
        """Whether the mode evaluates."""
        return self in (RunMode.EVAL_WAIT, RunMode.EVAL_ONCE)


def get_partitioner(config: Any) -> Layout | None:
    """Returns the layout that the flags request; None for one device."""
    return layout.layout_of(_open_run(types.ModuleType("model"), config))


def train(
    ckpt_path: str | None,
    same_dir: bool,
    rng: jax.Array,
    module: types.ModuleType,
    config: Any,
    partitioner: Layout | None,
) -> dict[str, float]:
    """Trains as the flags say; returns the metrics of the last check.

    Args:
        ckpt_path: A checkpoint to start from.
        same_dir: Whether it belongs to `--model_dir`, which then is resumed from it.
        rng: The key of the run.
        module: The model file.
        config: What its `load_config` returned.
        partitioner: Not used: the flags say the same.
    """
    del same_dir, partitioner
    high, low = (int(word) for word in np.asarray(jax.random.key_data(rng)).ravel()[-2:])
    changes = {"checkpoint_path": ckpt_path, "random_seed": (high << 32) + low}
    run = _open_run(module, config, **changes)
    if train_mode.train_run(run, LongProgram(run, "train", loaded=config)):
        raise InterruptedError(f"Training in {run.model_dir} was stopped.")
    path = paths.step_dir(run.model_dir, max(paths.list_steps(run.model_dir)))
    metrics = index.read_index(path).metrics
    return {name.removeprefix("train/"): value for name, value in metrics.items()}


def eval_or_predict(
    ckpt_path: str | None,
    mode: RunMode,
    module: types.ModuleType,
    config: Any,
    partitioner: Layout | None,
) -> dict[str, float] | None:
    """Evaluates a checkpoint, all checkpoints of `--model_dir`, or predicts.

    Args:
        ckpt_path: The checkpoint; None keeps the initial values.
        mode: What to do.
        module: The model file.
        config: What its `load_config` returned.
        partitioner: Not used: the flags say the same.

    Returns:
        The metrics of `EVAL_ONCE`, else None.
    """
    del partitioner
    run = _open_run(module, config)
    program = LongProgram(run, mode.value, loaded=config)
    with signals.stop_flag() as stop_flag:
        if mode is RunMode.EVAL_ONCE:
            return program.evaluation()(ckpt_path, stop_flag)
        if mode is RunMode.EVAL_WAIT:
            watcher = watch.Watcher(run, program.evaluation(), stop_flag)
            watcher.run(lambda step, metrics: train_mode.print_metrics(run.config, step, metrics))
        elif mode is RunMode.PREDICT:
            for result in program.predictions(ckpt_path, stop_flag):
                print(result)
    return None


def _open_run(module: types.ModuleType, config: Any, **changes: Any) -> Run:
    """Returns the run that the flags describe."""
    run_config: RunConfig = dataclasses.replace(config_of(FLAGS), module_config=None, **changes)
    if run_config.model_dir is None:
        raise UsageError("No directory for the run. Set FLAGS.model_dir.")
    model_dir = pathlib.Path(run_config.model_dir).expanduser().absolute()
    return Run(config=run_config, module=module, settings=config, model_dir=model_dir)
