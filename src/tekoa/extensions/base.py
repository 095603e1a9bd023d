"""Stages: functions from a checkpoint to the same checkpoint, run one after another."""

from collections.abc import Callable

from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.triggers import Trigger

Stage = Callable[..., Checkpoint]


def serial(*stages: Stage) -> Stage:
    """Makes one stage of several; each gets what the one before it returned.

    Raises:
        TypeError: If a stage cannot be called, or does not return a checkpoint.

    >>> serial()('checkpoint')
    'checkpoint'
    """
    for stage in stages:
        if not callable(stage):
            raise TypeError(f"A stage must be callable, got {stage!r}.")

    def process(checkpoint: Checkpoint) -> Checkpoint:
        for stage in stages:
            checkpoint = stage(checkpoint)
            if not isinstance(checkpoint, Checkpoint):
                raise TypeError(
                    f"Stage {getattr(stage, '__name__', type(stage).__name__)!r} must return the "
                    f"checkpoint it was given, got {type(checkpoint).__name__}."
                )
        return checkpoint

    return process


def when(trigger: Trigger, stage: Stage) -> Stage:
    """Makes a stage that runs only where the trigger is due."""

    def process(checkpoint: Checkpoint) -> Checkpoint:
        return stage(checkpoint) if trigger.is_due(checkpoint) else checkpoint

    return process
