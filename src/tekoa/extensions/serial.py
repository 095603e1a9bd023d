"""Stages: callables that receive a checkpoint and return it, run one after another."""

from collections.abc import Callable

from tekoa.loop.checkpoint import Checkpoint
from tekoa.loop.triggers import Trigger

Stage = Callable[..., Checkpoint]


def serial(*stages: Stage) -> Stage:
    """Combines stages into one; each receives what the previous one returned.

    Raises:
        TypeError: If a stage is not callable, or does not return a checkpoint.

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
                    f"checkpoint that it received, got {type(checkpoint).__name__}."
                )
        return checkpoint

    return process


def when(trigger: Trigger, stage: Stage) -> Stage:
    """Creates a stage that runs only if the trigger is due."""

    def process(checkpoint: Checkpoint) -> Checkpoint:
        return stage(checkpoint) if trigger.is_due(checkpoint) else checkpoint

    return process
