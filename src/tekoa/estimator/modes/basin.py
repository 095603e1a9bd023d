"""`tekoa scales MODEL --check`: is the size of the steps that `auto` takes a good one here?

The model is trained for a few steps with `auto` and with multiples of its steps. If its settings
have a width, it is also trained at a half and a quarter of it: the best multiple should not move.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.core import step as steps
from tekoa.core.loss.reduction import split_metrics
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.model_file.program import Program, program_of
from tekoa.estimator.run import run as runs
from tekoa.estimator.run import run_files
from tekoa.loop.task import TrainTask, model_fns_for
from tekoa.optim import sphere
from tekoa.optim.scales.table import ScaleTable
from tekoa.store.mirror import mirror

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # On the steps of `auto`.
TOLERANCE = 1.05  # The default is good enough if its loss is within this factor of the best.
_N_STEPS = 60
_SECONDS = 30.0  # For the steps of all probes together, without compilation.
_BAR = 40
_WIDTHS = ("width", "d_model", "hidden_size", "d_hidden", "n_hidden")


def run_check(config: RunConfig) -> int:
    """Prints the losses around the default, as a picture, and returns the exit code.

    If `--model_dir` is a run, its page shows them too.
    """
    sizes = dict(_sizes(config))
    good, lines = [], []
    for name, sized in sizes.items():
        program = program_of(runs.open_run(sized), "train")
        losses = probe(program, seconds=_SECONDS / len(sizes))
        lines += [name, *picture(losses)]
        print("\n".join(lines[-len(losses) - 1 :]), flush=True)
        good.append(is_in_basin(losses))
    lines.append(_verdict(good, list(sizes)))
    print(lines[-1])
    model_dir = runs.open_run(config).model_dir
    if (model_dir / run_files.RUN_FILE).exists() and not mirror.is_url(config.model_dir):
        (model_dir / run_files.CHECK_FILE).write_text("\n".join(lines) + "\n")
        print(f"The page of {model_dir} shows it too: tekoa page {model_dir}")
    return 0


def _sizes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields a title and the flags of each size of the model."""
    settings = runs.open_run(config).settings
    name = next((n for n in _WIDTHS if isinstance(getattr(settings, n, None), int)), None)
    if name is None:
        yield "The model as it is:", config
        return
    width = getattr(settings, name)
    for n in (width // 4, width // 2, width):
        # Heads and groups must divide the width.
        if n == width or (n >= 8 and n % 8 == 0):
            overrides = {**config.overrides, name: str(n)}
            yield f"{name}={n}:", dataclasses.replace(config, overrides=overrides)


def probe(program: Program, *, seconds: float, n_steps: int = _N_STEPS) -> dict[float, float]:
    """Trains with several multiples of the steps of `auto`.

    Args:
        program: A model file in the short form.
        seconds: Time for all steps; there are fewer of them if they take longer.
        n_steps: The number of steps of each run.

    Returns:
        Factor on the steps of `auto` -> mean loss over the last third of the run, infinite if it
        diverged.

    Raises:
        UsageError: If the model file hides its loss in a step of its own.
    """
    parts = program.train_parts((), None)
    if not isinstance(parts.task, TrainTask):
        raise UsageError("--check needs a model file in the short form, with a loss.")
    batches = list(itertools.islice(program.train_batches(seed=0), n_steps))
    run = _make_run(parts.model, parts.task, program.scales(), batches)
    run(batches[:2], 0.0)  # Compiles.
    start = time.perf_counter()
    run(batches[:3], 0.0)
    per_step = (time.perf_counter() - start) / 3
    n = min(len(batches), max(6, int(seconds / per_step / len(FACTORS))))
    return {factor: run(batches[:n], factor) for factor in FACTORS}


def _make_run(model: Any, task: TrainTask, table: ScaleTable, batches: Sequence[Any]) -> Any:
    """Returns `run(batches, factor)`, which trains from scratch; all runs share one program."""
    fns = model_fns_for(task, model)
    optimizer = optax.inject_hyperparams(
        lambda learning_rate: sphere.sphere(table, learning_rate=learning_rate)
    )(learning_rate=0.0)
    loss = None if task.loss is None else functools.partial(_value_of, task.loss)
    step = jax.jit(steps.make_train_step(fns, loss, optimizer, split=task.split, on_nan="ignore"))
    inputs, _ = task.split(batches[0])
    initial = steps.init_state(fns, optimizer, jax.random.key(0), inputs=inputs)

    def run(batches: Sequence[Any], factor: float) -> float:
        state, losses = initial, []
        size = sphere.step_size(len(batches))
        for i, batch in enumerate(batches):
            rate = jnp.asarray(factor * size(i), jnp.float32)
            hyperparams = {**state.opt_state.hyperparams, "learning_rate": rate}
            opt_state = state.opt_state._replace(hyperparams=hyperparams)
            state, output = step(dataclasses.replace(state, opt_state=opt_state), batch)
            losses.append(output.loss)
        last = np.mean(jax.device_get(losses[-max(1, len(losses) // 3) :]))
        return float(last) if math.isfinite(last) else math.inf

    return run


def _value_of(loss: Any, *args: Any) -> Any:
    """Returns the value of a loss without its metrics."""
    return split_metrics(loss(*args))[0]


def is_in_basin(losses: Mapping[float, float]) -> bool:
    """Whether the loss of the default is about the lowest.

    A basin has one bottom: a default that is above both of its neighbours is noise.

    >>> is_in_basin({0.5: 1.2, 1.0: 1.0, 2.0: 0.99})
    True
    >>> is_in_basin({0.5: 1.0, 1.0: 1.2, 2.0: 1.1})
    True
    >>> is_in_basin({0.5: 3.0, 1.0: 2.0, 2.0: 1.0})
    False
    """
    lowest, default = min(losses.values()), losses[1.0]
    is_bump = math.isfinite(default) and default > max(losses[0.5], losses[2.0])
    return is_bump or default <= lowest + (TOLERANCE - 1) * abs(lowest)


def picture(losses: Mapping[float, float]) -> list[str]:
    r"""Draws one bar per factor, longer for a lower loss.

    >>> print('\n'.join(picture({0.5: 3.0, 1.0: 1.0, 2.0: math.inf})))
      x 0.5   loss 3
      x 1     loss 1          ######################################## the default
      x 2     diverged
    """
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    lines = []
    for factor, loss in losses.items():
        is_finite = math.isfinite(loss)
        share = (high - loss) / (high - low) if is_finite and high > low else float(is_finite)
        text = f"loss {loss:.4g}" if is_finite else "diverged"
        mark = " the default" if factor == 1 else ""
        lines.append(f"  x {factor:<5g} {text:<14} {'#' * round(_BAR * share)}{mark}".rstrip())
    return lines


def _verdict(good: Sequence[bool], names: Sequence[str]) -> str:
    if all(good):
        return "The default is in the basin: no multiple of its steps is clearly better."
    where = ", ".join(name.rstrip(":") for name, is_good in zip(names, good) if not is_good)
    return (
        f"The default is not in the basin ({where}): another multiple is better by more than "
        f"{100 * (TOLERANCE - 1):.0f} % in these few steps. Check the table of `tekoa scales` for "
        "parameters that are not placed, or pass tekoa.sphere(table, c=...) as the optimizer."
    )
