"""Whether the default holds at other widths, depths, batch sizes and initial weights.

Every check is a function of the results that returns Markdown. The sizes are those of a few
minutes; `full` gives the published ones.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import contestants, data, models, report, tasks
from . import results as results_lib

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # On the default of `auto`.
ADAMW_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)


def resized(task: tasks.Task, about: str, n_steps: int, **changes: Any) -> tasks.Task:
    """Returns a task with another model of the same class."""
    model = task.model.clone(**changes)
    return dataclasses.replace(task, about=about, model=model, n_steps=n_steps)


def best_of_parabola(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Returns the rate at the bottom of a parabola through the three best, in log rate."""
    place = int(np.clip(np.argmin(losses), 1, len(rates) - 2))
    near = slice(place - 1, place + 2)
    curvature, slope, _ = np.polyfit(np.log(rates[near]), losses[near], 2)
    return math.exp(-slope / 2 / curvature) if curvature > 0 else rates[int(np.argmin(losses))]


@dataclasses.dataclass(frozen=True)
class Size:
    """One size of a model."""

    name: str
    task: tasks.Task
    n_seeds: int = 3
    n_seeds_of_adamw: int = 3


def sweep(results: results_lib.Results, sizes: Sequence[Size]) -> str:
    """Trains every size at several rates, with `auto` and with AdamW; losses are means."""

    def loss(task: tasks.Task, contestant: contestants.Contestant, n_seeds: int) -> float:
        runs = [results.get(task, contestant, seed)["loss"] for seed in range(n_seeds)]
        return float(np.mean([99.0 if run is None else run for run in runs]))

    settings = {
        "auto": [(f, contestants.auto_setting(f)) for f in FACTORS],
        "AdamW": [(r, contestants.adamw_setting(r, 0.0)) for r in ADAMW_RATES],
    }
    rows = []
    for name, line in settings.items():
        rates = [rate for rate, _ in line]
        for size in sizes:
            n_seeds = size.n_seeds if name == "auto" else size.n_seeds_of_adamw
            if not n_seeds:
                continue
            losses = [loss(size.task, contestant, n_seeds) for _, contestant in line]
            best = f"{best_of_parabola(rates, losses):.3g}"
            default = losses[rates.index(1.0)] / min(losses) if name == "auto" else math.nan
            cells = [f"{loss:.4g}" for loss in losses]
            default = f"{default:.3f}" if name == "auto" else ""
            rows.append([name, size.name, str(n_seeds), best, default, *cells])
    n_columns = max(map(len, rows))
    header = ["optimizer", "size", "seeds", "best rate", "default / best", "losses by rising rate"]
    header += [""] * (n_columns - len(header))
    return report.markdown_table(header, [row + [""] * (n_columns - len(row)) for row in rows])


def width(results: results_lib.Results, full: bool) -> str:
    """Best rates of an MLP and a transformer by width."""
    mlp, chars = tasks.TASKS["mlp"], tasks.TASKS["chars"]
    mlp_sizes = [
        Size(f"MLP {n}", resized(mlp, f"MLP of width {n} on MNIST", 300, widths=(n, n, 10)))
        for n in (64, 256, 1024, 2048)
    ]
    n_steps = 1000 if full else 250
    transformer_sizes = [
        Size(
            f"transformer {n}",
            resized(chars, f"transformer of width {n}", n_steps, width=n),
            # The larger ones take minutes per run.
            n_seeds=3 if full or n < 512 else 1,
            n_seeds_of_adamw=3 if full or n < 256 else int(n < 512),
        )
        for n in (32, 64, 128, 256, 512)
    ]
    return "\n\n".join(sweep(results, sizes) for sizes in (mlp_sizes, transformer_sizes))


def depth(results: results_lib.Results, full: bool) -> str:
    """Best rates of a residual network by depth."""
    base = dataclasses.replace(tasks.TASKS["digits"], load=data.small_mnist, batch_size=64)
    sizes = [
        Size(f"{n} blocks", resized(base, f"residual MLP, {n} blocks, MNIST", 400, n_blocks=n))
        for n in (2, 4, 6, 8, 12)
    ]
    return sweep(results, sizes)


def initial_weights(results: results_lib.Results, full: bool) -> str:
    """Losses with initial kernels times 0.1 and 10, for `auto` and AdamW at its best."""
    rows = []
    seeds = (0, 1, 2)
    for name in ("mlp", "cnn", "regression", "words", "chars")[: 5 if full else 4]:
        task = tasks.TASKS[name]
        best = results_lib.best_adamw(results, task, seeds)[0]
        for contestant in (contestants.CONTESTANTS["auto"], best):
            losses = []
            for scale in (1.0, 0.1, 10.0):
                run = {} if scale == 1 else {"init_scale": scale}
                records = [results.get(task, contestant, seed, **run) for seed in seeds]
                losses.append(report.score(records).loss)
            rows.append(
                [name, contestant.name, *(f"{x:.4g} ({x / losses[0]:.2f})" for x in losses)]
            )
    return report.markdown_table(["task", "optimizer", "as usual", "x 0.1", "x 10"], rows)


def batch_size(results: results_lib.Results, full: bool) -> str:
    """Losses at a quarter and four times the batch, with as many examples."""
    rows = []
    for name in ("mlp", "cnn", "words", "chars")[: 4 if full else 2]:
        base = tasks.TASKS[name]
        for factor in (0.25, 4):
            size, n_steps = int(base.batch_size * factor), int(base.n_steps / factor)
            task = dataclasses.replace(base, batch_size=size, n_steps=n_steps)
            seeds = (0, 1, 2) if full else (0,)
            best, records = results_lib.best_adamw(results, task, seeds)
            auto = contestants.CONTESTANTS["auto"]
            mine = report.score([results.get(task, auto, seed) for seed in seeds]).loss
            theirs = report.score(records).loss
            cells = f"{theirs:.4g} ({best.name})", f"{mine:.4g}", f"{mine / theirs:.3f}"
            rows.append([name, str(size), str(n_steps), *cells])
    return report.markdown_table(["task", "batch", "steps", "best AdamW", "auto", "ratio"], rows)


NANOGPT = tasks.Task(
    name="nanogpt",
    about="nanoGPT's CPU setting: 4 layers, width 128, blocks of 64 characters",
    model=models.Transformer(width=128, n_layers=4, tied=True),
    load=tasks.text(data.characters, 111_540),
    take=tasks.TakeWindows(64),
    batch_size=12,
    n_steps=2000,
)

MNIST_CNN = tasks.Task(
    name="mnist_cnn",
    about="CNN 32-64-256 on MNIST, 9 epochs",
    model=models.Cnn(features=(32, 64), dense=256),
    load=data.mnist,
    batch_size=64,
    n_steps=9 * 60_000 // 64,
)


def published(
    results: results_lib.Results,
    task: tasks.Task,
    optimizers: Sequence[tuple[contestants.Contestant, int]],
) -> str:
    """Loss and accuracy of optimizers, each with a number of seeds, in a published setting."""
    rows = []
    for contestant, n_seeds in optimizers:
        runs = report.score([results.get(task, contestant, seed) for seed in range(n_seeds)])
        losses = ", ".join(f"{loss:.4g}" for loss in runs.losses)
        accuracy = f"{100 * runs.accuracy:.2f}"
        rows.append([contestant.name, str(n_seeds), losses, f"{runs.loss:.4g}", accuracy])
    header = ["optimizer", "seeds", "losses", "mean loss", "mean accuracy"]
    return f"{task.about}:\n\n{report.markdown_table(header, rows)}"


def nanogpt(results: results_lib.Results, full: bool) -> str:
    """The setting of nanoGPT, also with AdamW at a rate of 3e-3."""
    adamw = contestants.adamw_setting(3e-3, 0.0)
    return published(results, NANOGPT, [(AUTO, 3 if full else 1), (adamw, 1)])


def mnist(results: results_lib.Results, full: bool) -> str:
    """MNIST, also with an average of the parameters."""
    n_seeds = 3 if full else 1
    return published(results, MNIST_CNN, [(AUTO, n_seeds), (contestants.WITH_AVERAGE, n_seeds)])


AUTO = contestants.CONTESTANTS["auto"]

CHECKS = {
    "width": width,
    "depth": depth,
    "init": initial_weights,
    "batch": batch_size,
    "nanogpt": nanogpt,
    "mnist": mnist,
}
