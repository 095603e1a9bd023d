"""`--dry_run`: compiles, reads some data, tells what it saw, and writes nothing."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax

from tekoa.core import batch as batches
from tekoa.core import trees
from tekoa.estimator import restore
from tekoa.estimator.program import Program
from tekoa.estimator.run import N_DRY_BATCHES, Run
from tekoa.loop.train import TrainLoop
from tekoa.store import names, signals, steps

_END = "This was a dry run: nothing was written."


def train(make_loop: Callable[[], TrainLoop], program: Program) -> int:
    """Runs a few steps and a short validation; gives the exit code."""
    seconds = []
    with _compiling() as compiled:
        loop = make_loop()
        for _ in range(N_DRY_BATCHES):
            try:
                seconds.append(loop.next_step().elapsed_time)
            except StopIteration:
                print(f"The data has ended at step {loop.step}.")
                break
        checkpoint = loop.checkpoint()
        validation = program.validation(loop)
        summary = None if validation is None else validation(checkpoint)
    params = checkpoint.state.params
    _tell_data(program.sample("train"))
    _tell_parameters(len(jax.tree.leaves(params)), trees.n_elements(params), trees.n_bytes(params))
    if summary is not None:
        _tell_metrics(summary.metrics["train"])
    _tell_compiling(compiled)
    # The first one is mostly compilation.
    later = seconds[1:]
    if later:
        print(f"a step:     {sum(later) / len(later) * 1e3:.3g} ms, the mean of {len(later)}")
    print(_END)
    return 0


def evaluate(run: Run, program: Program) -> int:
    """Evaluates a few batches; gives the exit code."""

    def work(path: str | None) -> None:
        _tell_metrics(program.evaluation()(path, signals.StopFlag()))

    return _infer(run, program, "eval", work)


def predict(run: Run, program: Program) -> int:
    """Predicts a few batches and drops the results; gives the exit code."""

    def work(path: str | None) -> None:
        results = list(program.predictions(path, signals.StopFlag()))
        print(f"results:    {len(results)}")

    return _infer(run, program, "pred", work)


def _infer(
    run: Run, program: Program, kind: Literal["eval", "pred"], work: Callable[[str | None], None]
) -> int:
    _tell_data(program.sample(kind))
    path = None
    if run.config.checkpoint_path is not None or names.list_steps(run.model_dir):
        path = restore.find_step(run.model_dir, run.config.checkpoint_path)
        stored = steps.open_step(path).index.leaves.values()
        params = [leaf for leaf in stored if leaf.name[0] == "model_params"]
        n_elements = sum(math.prod(leaf.shape) for leaf in params)
        _tell_parameters(len(params), n_elements, sum(leaf.n_bytes for leaf in params))
    else:
        print("parameters: as initialised; there is no checkpoint yet")
    began = time.perf_counter()
    with _compiling() as compiled:
        work(None if path is None else str(path))
    _tell_compiling(compiled)
    print(f"the rest:   {time.perf_counter() - began - sum(compiled):.2f} s")
    print(_END)
    return 0


@contextlib.contextmanager
def _compiling() -> Iterator[list[float]]:
    """Gathers the seconds that XLA spends on each program."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _tell_data(batch: Any) -> None:
    print(f"batch:      {batches.describe(batch)}")


def _tell_parameters(n_arrays: int, n_elements: int, n_bytes: int) -> None:
    print(f"parameters: {n_elements} in {n_arrays} arrays, {n_bytes / 1e6:.3f} MB")


def _tell_metrics(found: Mapping[str, float]) -> None:
    print("metrics:    " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))


def _tell_compiling(compiled: list[float]) -> None:
    print(f"compiling:  {sum(compiled):.2f} s for {len(compiled)} programs")
