"""`--dry_run`: compiles, reads a few batches, prints a summary and writes nothing."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax

from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.estimator.model_file.program import Program, TrainParts
from tekoa.estimator.run import eval_state
from tekoa.estimator.run.run import N_DRY_BATCHES, Run
from tekoa.hosts import signals
from tekoa.loop.train import TrainLoop
from tekoa.store.commit import paths
from tekoa.store.formats import step

_END = "Dry run: nothing was written."


def train(program: Program, make_loop: Callable[[], tuple[TrainParts, TrainLoop]]) -> int:
    """Runs a few steps and a short validation, and returns the exit code."""
    seconds = []
    with _compile_times() as compile_seconds:
        parts, loop = make_loop()
        for _ in range(N_DRY_BATCHES):
            try:
                seconds.append(loop.next_step().elapsed_time)
            except StopIteration:
                print(f"The training data ends at step {loop.step}.")
                break
        checkpoint = loop.checkpoint()
        validation = program.validation(parts, loop)
        summary = None if validation is None else validation(checkpoint)
    params = checkpoint.state.params
    print(f"batch:      {batches.describe(program.sample('train'))}")
    _print_parameters(len(jax.tree.leaves(params)), trees.n_elements(params), trees.n_bytes(params))
    if summary is not None:
        print(_metrics_line(summary.metrics["train"]))
    _print_compile_times(compile_seconds)
    warm = seconds[1:]  # The first step is mostly compilation.
    if warm:
        print(f"step time:  {sum(warm) / len(warm) * 1e3:.3g} ms (mean of {len(warm)})")
    print(_END)
    return 0


def evaluate(run: Run, program: Program) -> int:
    """Evaluates a few batches and returns the exit code."""

    def evaluate_step(path: str | None) -> str:
        return _metrics_line(program.evaluation()(path, signals.StopFlag()))

    return _run_on_step(run, program, "eval", evaluate_step)


def predict(run: Run, program: Program) -> int:
    """Predicts a few batches, discards the results and returns the exit code."""

    def predict_step(path: str | None) -> str:
        return f"results:    {len(list(program.predictions(path, signals.StopFlag())))}"

    return _run_on_step(run, program, "pred", predict_step)


def _run_on_step(
    run: Run, program: Program, kind: Literal["eval", "pred"], action: Callable[[str | None], str]
) -> int:
    print(f"batch:      {batches.describe(program.sample(kind))}")
    path = None
    if run.config.checkpoint_path is not None or paths.list_steps(run.model_dir):
        path = eval_state.find_step(run.model_dir, run.config.checkpoint_path)
        leaves = step.open_step(path).index.leaves.values()
        params = [leaf for leaf in leaves if leaf.name[0] == "model_params"]
        n_elements = sum(math.prod(leaf.shape) for leaf in params)
        _print_parameters(len(params), n_elements, sum(leaf.n_bytes for leaf in params))
    else:
        print("parameters: initial values, since there is no checkpoint yet")
    start = time.perf_counter()
    with _compile_times() as compile_seconds:
        print(action(None if path is None else str(path)))
    _print_compile_times(compile_seconds)
    print(f"running:    {time.perf_counter() - start - sum(compile_seconds):.2f} s")
    print(_END)
    return 0


@contextlib.contextmanager
def _compile_times() -> Iterator[list[float]]:
    """Collects the seconds that XLA spends compiling each program."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _print_parameters(n_arrays: int, n_elements: int, n_bytes: int) -> None:
    print(f"parameters: {n_elements} in {n_arrays} arrays, {n_bytes / 1e6:.3f} MB")


def _metrics_line(metrics: Mapping[str, float]) -> str:
    return "metrics:    " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _print_compile_times(seconds: list[float]) -> None:
    print(f"compiling:  {sum(seconds):.2f} s for {len(seconds)} programs")
