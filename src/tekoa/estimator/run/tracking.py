"""The trackers that the flags of a run name."""

import contextlib

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run.run import Run
from tekoa.extensions.trackers.tracker import Tracker


def trackers(run: Run, stack: contextlib.ExitStack) -> list[Tracker]:
    """Creates the trackers of --track; they are closed with the stack.

    Raises:
        UsageError: If there is no tracker of a name.
    """
    project = run.config.track_project or run.module.__name__.rpartition(".")[2]
    names = dict.fromkeys(run.config.track)
    try:
        stages = [Tracker(name, run.model_dir, project=project) for name in names]
    except ValueError as error:
        raise UsageError(f"--track: {error}") from None
    return [stack.enter_context(contextlib.closing(stage)) for stage in stages]
