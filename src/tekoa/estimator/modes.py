"""The modes of the command, put together from loops, extensions, data and store."""

import contextlib
import json
import pathlib
import platform
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tekoa import data
from tekoa.core import metrics as means
from tekoa.estimator import module as modules
from tekoa.estimator.config import RunConfig, UsageError
from tekoa.estimator.overrides import apply_overrides
from tekoa.extensions import base, files, progress, tensorboard
from tekoa.loop import evaluate, task, train
from tekoa.loop.checkpoint import Checkpoint, Summary, as_summary
from tekoa.loop.triggers import EverySteps
from tekoa.store import files as store_files
from tekoa.store import signals

KEEP_ALL = 10**9


def run_train(config: RunConfig) -> int:
    """Trains a model; gives the exit code."""
    module = modules.load_module(config.module_imp)
    config = config.with_defaults(getattr(module, "DEFAULTS", {}))
    model_dir = _model_dir(config)
    if config.train_pattern is None:
        raise UsageError("Training needs data: --train_pattern=PATTERN.")
    seed = _settled_seed(config, model_dir)
    source = data.load(config.train_pattern)
    batches = _train_batches(config, source, seed)
    experiment = _experiment(module, config, source)
    with signals.stop_flag() as stop_flag, contextlib.ExitStack() as stack:
        loop = train.TrainLoop(
            files.CheckpointFileReader(model_dir, target=experiment.model),
            task.TrainTask(
                optimizer=experiment.optimizer,
                loss=experiment.loss,
                data=batches,
                split=experiment.split,
            ),
            n_steps=_last_step(config, batches),
            n_steps_per_checkpoint=config.check_every_steps,
            rnkey=jax.random.key(seed),
            accumulate=config.accumulate,
            ema=config.ema,
            precision=config.precision,  # pyright: ignore[reportArgumentType]
            on_nan=config.on_nan,  # pyright: ignore[reportArgumentType]
            steps_per_dispatch=_steps_per_dispatch(config),
            grads=False,
            stop_flag=stop_flag,
            stdout=True,
        )
        validation = _validation(config, experiment, loop)
        process = base.serial(*_stages(config, model_dir, validation, loop, stack))
        last = None
        for checkpoint in loop:
            last = process(checkpoint)
        if last is None:
            print(f"Nothing left to train: step {loop.step} is done.")
    if stop_flag.is_set():
        print(f"Stopped at step {loop.step}; the same command goes on from there.")
        return signals.EXIT_STOPPED
    _conclude(config, validation, last, loop, model_dir)
    return 0


def _conclude(
    config: RunConfig,
    validation: Callable[[Checkpoint], Summary] | None,
    last: Checkpoint | None,
    loop: train.TrainLoop,
    model_dir: pathlib.Path,
) -> None:
    """Ends in a result to look at."""
    if validation is not None:
        summary = as_summary(last) if last is not None else validation(_snapshot(loop))
        found = summary.metrics.get("valid", {})
        if config.json:
            print(json.dumps({"step": loop.step, **found}))
        for name, value in found.items():
            print(f"{name} {value:.4f}  ({config.valid_pattern}, step {loop.step})")
    print(f"Checkpoints and TensorBoard files are in {model_dir}.")


def _snapshot(loop: train.TrainLoop) -> Summary:
    state = loop.state
    return Summary(
        state=state,
        step=loop.step,
        loss=jax.numpy.nan * state.step,
        grads=None,
        n_completed_steps=0,
        elapsed_time=0.0,
    )


def _stages(
    config: RunConfig,
    model_dir: pathlib.Path,
    validation: Callable[[Checkpoint], Summary] | None,
    loop: train.TrainLoop,
    stack: contextlib.ExitStack,
) -> Iterator[base.Stage]:
    """What happens at every check; each thing is closed when training ends."""
    if validation is not None:
        yield validation
    if config.progress:
        yield stack.enter_context(contextlib.closing(progress.ProgressBar(loop.n_steps)))
    writer = tensorboard.SummaryWriter(model_dir / "train", params=True)
    yield stack.enter_context(contextlib.closing(writer))
    keeper = files.CheckpointFileWriter(model_dir, keep=config.max_ckpt)
    yield stack.enter_context(contextlib.closing(keeper))
    if config.save_every_steps is not None:
        saver = files.CheckpointFileWriter(model_dir / "save", keep=KEEP_ALL)
        stack.enter_context(contextlib.closing(saver))
        yield base.when(EverySteps(config.save_every_steps), saver)


def _validation(
    config: RunConfig, experiment: modules.Experiment, loop: train.TrainLoop
) -> evaluate.EvalLoop | None:
    if config.valid_pattern is None:
        return None
    source = data.load(config.valid_pattern)
    return evaluate.EvalLoop(
        task.EvalTask(
            metrics={"valid_loss": _loss_metric(experiment), **experiment.metrics},
            data=_Again(
                lambda: source.batches(
                    config.valid_batch_size,
                    epochs=1,
                    remainder="keep",
                    take=config.num_valid_examples,
                )
            ),
            split=experiment.split,
        ),
        init=loop.model_fns,
        label="valid",
    )


class _Again:
    """Data that is read from its start at every pass."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def _loss_metric(experiment: modules.Experiment) -> Callable[..., Any]:
    def loss(*outputs_and_batch: Any) -> Any:
        found = experiment.loss(*outputs_and_batch)
        is_pair = isinstance(found, tuple) and not isinstance(found, means.Mean)
        return found[0] if is_pair else found

    return loss


def _experiment(module: Any, config: RunConfig, source: data.Source) -> modules.Experiment:
    settings = apply_overrides(module.get_config(), config.overrides)
    facts = modules.DataFacts(
        info=source.info,
        n_examples=len(source),
        batch_size=config.train_batch_size,
        sample=next(source.batches(min(config.train_batch_size, len(source)))),
    )
    return module.experiment(settings, facts)


def _train_batches(config: RunConfig, source: data.Source, seed: int) -> data.Batches:
    return source.batches(
        config.train_batch_size,
        seed=seed,
        shuffle=config.train_shuffle_buf,
        epochs=config.train_epochs,
        consecutive=config.train_consecutive,
    )


def _last_step(config: RunConfig, batches: data.Batches) -> int | None:
    ends = [n for n in (config.max_train_steps, batches.n_batches) if n is not None]
    return min(ends) if ends else None


def _steps_per_dispatch(config: RunConfig) -> Any:
    text = config.steps_per_dispatch
    if text != "auto" and not text.isdigit():
        raise UsageError(f"--steps_per_dispatch must be 'auto' or a number, got {text!r}.")
    return text if text == "auto" else int(text)


def _model_dir(config: RunConfig) -> pathlib.Path:
    if config.model_dir is None:
        raise UsageError("Where should the run be kept? Give --model_dir=DIR.")
    path = pathlib.Path(config.model_dir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--model_dir={config.model_dir} cannot be used: {error}.") from None
    return path


def _settled_seed(config: RunConfig, model_dir: pathlib.Path) -> int:
    """The seed given, or that of the run, or a new one; stored with the run."""
    path = model_dir / "run.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    seed = config.random_seed if config.random_seed is not None else stored.get("random_seed")
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    facts = {
        "random_seed": seed,
        "command": sys.argv,
        "module": config.module_imp,
        "overrides": dict(config.overrides),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    store_files.replace(path, json.dumps(facts, indent=1).encode())
    return seed
