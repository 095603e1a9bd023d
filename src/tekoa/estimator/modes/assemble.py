"""The training loop of a run, from the parts of its model file and its flags."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tekoa.data import interop
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.model_file.program import Program, TrainParts
from tekoa.estimator.run import cadence
from tekoa.estimator.run import layout as layout_lib
from tekoa.estimator.run.run import Run
from tekoa.hosts.signals import StopFlag
from tekoa.loop import train
from tekoa.loop.task import StateReader
from tekoa.optim.freezing import NeverTrainedError
from tekoa.optim.groups import UnusedRuleWarning

# `make_reader(parts, data_state)`: what the loop starts from; `data_state` is the first position.
MakeReader = Callable[[TrainParts, Any], StateReader]


def training_loop(
    run: Run,
    program: Program,
    seed: int,
    *,
    make_reader: MakeReader,
    stop_flag: StopFlag | None = None,
    stdout: bool = True,
) -> tuple[TrainParts, train.TrainLoop]:
    """Builds the loop of a run; see `TrainLoop` for the arguments not listed here.

    Args:
        run: The run.
        program: Its model file.
        seed: Its seed.
        make_reader: Returns what the loop starts from.
        stop_flag: Ends the loop once it is set.
        stdout: Whether the loop prints its messages.

    Raises:
        UsageError: If flags do not fit together.
    """
    config = run.config
    batches = program.train_batches(seed)
    if uneven := [size for size in batches.batch_sizes if size % config.accumulate]:
        flag = "train_batch_size" if uneven[0] == config.train_batch_size else "batch_schedule"
        raise UsageError(
            f"--accumulate={config.accumulate} must divide the rows of every batch, but "
            f"--{flag} sets {uneven[0]}."
        )
    parts = program.train_parts(batches, layout_lib.layout_of(run))
    with _freezing_mistakes_are_named(config):
        loop = train.TrainLoop(
            make_reader(parts, interop.position(batches)),
            parts.task,
            layout=parts.layout,
            n_steps=_n_steps(config, batches),
            n_steps_per_checkpoint=cadence.steps_between(
                config.check_every_steps, config.save_every_steps
            ),
            rng=jax.random.key(seed),
            accumulate=config.accumulate,
            ema=config.ema,
            precision=config.precision,
            on_nan=config.on_nan,
            steps_per_dispatch=_steps_per_dispatch(config),
            grads="norms" if config.log_norms else False,
            stop_flag=stop_flag,
            stdout=stdout,
        )
    return parts, loop


@contextlib.contextmanager
def _freezing_mistakes_are_named(config: RunConfig) -> Iterator[None]:
    """Raises UsageError if `--unfreeze_at` or `--freeze_at` does not suit the parameters."""
    flags = [f"--{name}" for name in ("unfreeze_at", "freeze_at") if getattr(config, name)]
    if not flags:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedRuleWarning)
        try:
            yield
        except (UnusedRuleWarning, NeverTrainedError) as mistake:
            raise UsageError(f"{', '.join(flags)}: {mistake}") from None


def _n_steps(config: RunConfig, batches: Any) -> int | None:
    # A loaded step does not count batches from the start of the data: training ends with them.
    n_batches = None if config.train_load_step else batches.n_batches
    ends = (n for n in (config.max_train_steps, n_batches) if n is not None)
    return min(ends, default=None)


def _steps_per_dispatch(config: RunConfig) -> Any:
    text = config.steps_per_dispatch
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise UsageError(
            f"--steps_per_dispatch must be 'auto' or an integer of at least 1, got {text!r}."
        )
    return text if text == "auto" else int(text)
