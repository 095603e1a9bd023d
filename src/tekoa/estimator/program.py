"""What the modes need of a model file, whichever of its two forms it has."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import optax

from tekoa.core.sharding import Layout
from tekoa.estimator.config import UsageError
from tekoa.estimator.run import Run
from tekoa.estimator.short import Kind, ShortProgram
from tekoa.loop.checkpoint import Checkpoint, Summary
from tekoa.loop.task import StopFlag
from tekoa.loop.train import TrainLoop
from tekoa.loop.training import Training

Mode = Literal["train", "eval_once", "eval_wait", "predict"]


class Program(Protocol):
    """A model file, ready for the loops."""

    def check_data(self, kind: Kind) -> str:
        """Gives the pattern of the data that a mode needs."""
        ...

    def train_batches(self, seed: int) -> Any:
        """The endless or finite stream of training batches."""
        ...

    def train_loop(
        self, init: Callable[[Any, optax.GradientTransformation], Any], **options: Any
    ) -> TrainLoop:
        """The loop over those batches; `init(model, optimizer)` makes a reader of checkpoints."""
        ...

    def training(self, layout: Layout) -> tuple[Training, Layout]:
        """What the loop would run, without data; and the layout with the model's own rules."""
        ...

    def validation(
        self, loop: TrainLoop, stop_flag: StopFlag | None = None
    ) -> Callable[[Checkpoint], Summary] | None:
        """The stage that validates a checkpoint, where there is data for it.

        Raises `InterruptedError` once the flag is set.
        """
        ...

    def evaluation(self) -> Callable[[str | None, Any], dict[str, float]]:
        """Makes `evaluate(path, stop_flag)`, which gives the metrics of a stored step.

        Without a path the model is as initialised.
        """
        ...

    def predictions(self, path: str | None, stop_flag: Any) -> Iterator[Any]:
        """Gives one result per example, in order; without a path those of a new model."""
        ...

    def sample(self, kind: Kind) -> Any:
        """One batch of the data of a mode, as its step gets it."""
        ...

    def scales(self) -> Any:
        """The table of Amos scales, read off the model."""
        ...


def program_of(run: Run, mode: Mode) -> Program:
    """Gives what runs the model of a run in a mode.

    Raises:
        UsageError: If the file is no model.
    """
    module = run.module
    if hasattr(module, "experiment"):
        return ShortProgram(run)
    if hasattr(module, "get_train_state") or hasattr(module, "get_infer_state"):
        from tekoa.estimator.long import LongProgram  # Models of the short form start without it.

        return LongProgram(run, mode)
    raise UsageError(
        f"{module.__name__} is no model: it has neither experiment(config, data) nor "
        "get_train_state(config, rng)."
    )
