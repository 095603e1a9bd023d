"""`tekoa sweep` trains a model with several settings at once, and compares them.

Each combination of the grid and of the seeds is an ordinary run in a directory of its own, which
`tekoa train` can resume by itself. Runs whose programs differ in numbers only (rates, decays,
initial scales, seeds) share one compiled program; others, such as those with another width, train
beside them with their own. A run that meets NaN or Inf is stopped, and the others go on. The same
command again resumes a sweep that was killed, to the bit.

Flags:
  --grid=NAME=VALUES  what to sweep: FIRST..LAST:log:COUNT, FIRST..LAST:COUNT or VALUE,VALUE,...
                      NAME is a flag of `tekoa train`, or module_config.NAME for a setting of the
                      model. Repeat the flag for a grid of several numbers.
  --seeds=COUNT       runs of each combination, with the seeds 0, 1, ... (default: 1)
  --optuna=RUNS[:AT_ONCE]
                      Optuna chooses this many runs, in rounds of AT_ONCE (default: 8) that learn
                      from those before. --grid then has ranges without a count: FIRST..LAST:log,
                      FIRST..LAST or VALUE,VALUE,...
  --halving           stop the worse half of the runs after 1/8, 1/4 and 1/2 of the steps (for 8)
  --metric=NAME[:max] how runs are compared (default: valid_loss, or the training loss)
  --lanes=HOW         auto, or how runs share a program: turn or vmap
  --model_dir=DIR     the directory of the sweep (default: runs/MODEL_sweep)
All other flags are those of `tekoa train`.

Example: tekoa sweep mnist --optimizer=adam --grid 'learning_rate=1e-4..1e-2:log:5' --seeds=2
Example: tekoa sweep mnist --optuna=16 --grid 'ema=0.9..0.99' --model_dir=DIR
"""

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from tekoa import _extras
from tekoa.core import files
from tekoa.estimator.cli import flags
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.model_file import names
from tekoa.estimator.replay import arguments as arguments_lib
from tekoa.estimator.run import run as runs
from tekoa.estimator.sweep import grid as grids
from tekoa.estimator.sweep import picture, rounds
from tekoa.estimator.sweep.lanes import Goal, Outcome, Sweep
from tekoa.estimator.sweep.rounds import Rounds
from tekoa.hosts import signals
from tekoa.loop.lanes.machine import How
from tekoa.store.commit import durable

USAGE = "tekoa sweep MODEL --grid=NAME=VALUES [--seeds=COUNT] [--halving] [--flags of train]"
PICTURE = "sweep.svg"


def sweep(
    model: str | os.PathLike[str],
    grid: Mapping[str, Sequence[Any] | str],
    *,
    model_dir: str | os.PathLike[str],
    seeds: int = 1,
    optuna: str | int | None = None,
    halving: bool = False,
    metric: str | None = None,
    lanes: How = "auto",
    **train_flags: Any,
) -> list[Outcome]:
    """Trains a model file with several settings at once; each run has a directory of its own.

    Args:
        model: A bundled model, a module or the path of a .py file.
        grid: Name to values: a list, or text as for the command, such as "1e-4..1e-1:log:8".
            A name is a flag of `tekoa train`, or "module_config." and a setting of the model.
        model_dir: The directory of the sweep. The same call again resumes it.
        seeds: Runs of each combination, with the seeds 0, 1, ...
        optuna: Number of runs that Optuna chooses, such as 32, or "32:8" for rounds of 8 that
            learn from those before. The grid then has ranges without a count.
        halving: Whether to stop the worse half of the runs several times on the way.
        metric: How runs are compared, such as "valid_loss" or "valid_accuracy:max".
        lanes: How runs share a program: "turn" or "vmap"; "auto" chooses.
        **train_flags: Flags of `tekoa train`, such as `max_train_steps=200`.

    Returns:
        The results, best first.

    Raises:
        UsageError: If a name or a value is wrong.
        MissingPackageError: If `optuna` is set and Optuna is not installed.
        InterruptedError: If a signal stopped the sweep.
    """
    texts = [
        f"{name}={values if isinstance(values, str) else ','.join(map(str, values))}"
        for name, values in grid.items()
    ]
    words = [f"--{name}={value}" for name, value in train_flags.items()]
    _, config = flags.parse([*words, f"--model_dir={os.fspath(model_dir)}"])
    config = config.with_defaults({"module_imp": os.fspath(model)})
    asked = _Request(
        grid=texts, seeds=seeds, optuna=optuna, halving=halving, metric=metric, lanes=lanes
    )
    trained = _make(config, asked)
    with signals.stop_flag() as stop_flag:
        trained.train(stop_flag)
    if stop_flag.is_set():
        raise InterruptedError(f"The sweep in {model_dir} was stopped. Call it again to resume.")
    return trained.outcomes()


def run_sweep(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    parsed, rest = _parse(arguments)
    words, config = flags.parse(rest)
    if unused := flags.unused(config, "train"):
        raise UsageError(f"tekoa sweep does not use {', '.join(unused)}.")
    if len(words) > 1:
        raise UsageError(f"sweep accepts one model, got {' '.join(words)!r}.")
    if words:
        config = config.with_defaults({"module_imp": words[0]})
    names.check_model(config.module_imp)
    trained = _make(config, _Request(**vars(parsed)))
    from tekoa.estimator.cli import compile_cache

    with compile_cache.enabled(config.compile_cache), signals.stop_flag() as stop_flag:
        trained.train(stop_flag)
    if stop_flag.is_set():
        print("The sweep is stopped. Run the same command again to resume.")
        return signals.EXIT_STOPPED
    _print_results(trained.outcomes(), config)
    return ExitCode.SUCCESS


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = arguments_lib.Arguments("sweep")
    parser.add_argument("--grid", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--optuna")
    parser.add_argument("--halving", action="store_true")
    parser.add_argument("--metric")
    parser.add_argument("--lanes", choices=get_args(How), default="auto")
    parsed, rest = parser.parse_known_args(list(arguments))
    for word in rest:
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("--") and name not in flags.FLAG_NAMES and (hint := parser.hint(word)):
            raise UsageError(f"Unknown flag --{name}.{hint} Run `tekoa sweep --help`.")
    return parsed, rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """What a sweep was asked for; the flags of the command."""

    grid: Sequence[str]
    seeds: int
    optuna: str | int | None
    halving: bool
    metric: str | None
    lanes: How


def _make(config: RunConfig, request: _Request) -> Sweep | Rounds:
    """Checks the arguments and returns the sweep.

    Raises:
        UsageError: If one is wrong.
    """
    if request.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {request.seeds}.")
    if config.mesh or config.num_partitions > 1 or config.coordinator_address:
        raise UsageError("A sweep runs on one device: leave out the flags of meshes and processes.")
    if config.dry_run or config.again or config.json:
        raise UsageError("A sweep does not use --dry_run, --again or --json.")
    first = config.random_seed or 0
    seeds = range(first, first + request.seeds)
    model = pathlib.Path(config.module_imp or "").stem
    directory = files.local_path(config.model_dir or f"runs/{model}_sweep").absolute()
    config = dataclasses.replace(config, model_dir=str(directory))
    goal = Goal.parse(request.metric)
    integers = grids.integers(request.grid, runs.open_run(config).settings)

    def make_sweep(lanes: Sequence[grids.Lane]) -> Sweep:
        return Sweep(
            config, lanes, directory, goal=goal, how=request.lanes, is_halving=request.halving
        )

    if request.optuna is not None:
        space = [grids.parse_range(text, integers) for text in request.grid]
        if not space:
            raise UsageError("--optuna needs something to choose: set --grid=NAME=FIRST..LAST.")
        counts = rounds.parse_count(request.optuna)
        _extras.require("optuna", extra="optuna", what="--optuna")
        return Rounds(make_sweep, space, directory, goal=goal, counts=counts, seeds=seeds)
    lanes = grids.lanes_of([grids.parse_axis(text, integers) for text in request.grid], seeds)
    if len(lanes) < 2:
        raise UsageError("Nothing to sweep: set --grid=NAME=VALUES or --seeds=COUNT.")
    return make_sweep(lanes)


def _print_results(outcomes: Sequence[Outcome], config: RunConfig) -> None:
    """Prints the table and the pictures, and names the best run."""
    best = outcomes[0]
    print("\n".join(picture.table(outcomes)))
    panels = [
        (name.rpartition(".")[2], points)
        for name in best.lane.values
        if (points := picture.points_of(outcomes, name))
    ]
    for name, points in panels:
        print("\n".join(["", *picture.drawing(points, name, best.metric)]))
    directory = best.directory.parent
    if panels:
        durable.replace(directory / PICTURE, picture.svg(panels, best.metric).encode())
        print(
            f"\nThe picture is in {directory / PICTURE}; tekoa page {directory} compares the runs."
        )
    if best.value is None or best.stopped:
        print("No run was completed.")
        return
    chosen = {f"module_config.{name}": text for name, text in config.overrides.items()}
    if config.optimizer is not None:
        chosen["optimizer"] = config.optimizer
    chosen.update(best.lane.values)
    settings = " ".join(f"--{name}={value}" for name, value in chosen.items())
    print(
        f"The best run is {best.directory}: {best.metric} {best.value:.6g}.\nTo train it "
        f"further: tekoa train {config.module_imp} {settings} --model_dir={best.directory}"
    )
