"""Tables, pictures and the page of the results."""

import contextlib
import dataclasses
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import contestants, tasks
from . import results as results_lib

BEST_ADAMW = "best AdamW"
FAILED = 2.0  # A run that ends above this multiple of the best AdamW counts as failed.


@dataclasses.dataclass(frozen=True)
class Score:
    """The runs of one contestant on one task."""

    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    setting: str = ""

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies) if self.accuracies else math.nan

    @property
    def spread(self) -> float:
        """Half the range of the losses, relative to their mean."""
        return (max(self.losses) - min(self.losses)) / 2 / self.loss


Scores = Mapping[str, Mapping[str, Score]]  # By task, then by contestant.


def score(records: Sequence[Mapping[str, Any]], setting: str = "") -> Score:
    losses = [math.inf if record["loss"] is None else record["loss"] for record in records]
    accuracies = [record["accuracy"] for record in records if record["accuracy"] is not None]
    return Score(tuple(losses), tuple(accuracies), setting)


def collect(
    results: results_lib.Results,
    task_list: Sequence[tasks.Task],
    names: Sequence[str],
    seeds: tuple[int, ...],
) -> Scores:
    """Returns the scores of all contestants, without those that are not trained."""
    scores: dict[str, dict[str, Score]] = {}
    for task in task_list:
        best, records = results_lib.best_adamw(results, task, seeds)
        scores[task.name] = {BEST_ADAMW: score(records, best.name.removeprefix("adamw "))}
        for name in names:
            contestant = contestants.CONTESTANTS[name]
            with contextlib.suppress(results_lib.NotTrainedError):
                records = [results.get(task, contestant, seed) for seed in seeds]
                scores[task.name][name] = score(records)
    return scores


def contestants_of(scores: Scores) -> list[str]:
    return list(dict.fromkeys(name for by_name in scores.values() for name in by_name))


def ratio(scores: Scores, task: str, name: str) -> float:
    """Returns the loss relative to that of the best AdamW, NaN if it is not trained."""
    if name not in scores[task]:
        return math.nan
    return scores[task][name].loss / scores[task][BEST_ADAMW].loss


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean of the values that are not NaN."""
    logs = [math.log(value) for value in values if not math.isnan(value)]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def profile(scores: Scores, name: str, factor: float) -> float:
    """Returns the share of tasks on which a contestant is within `factor` of the best of all."""
    within = [
        by_name[name].loss <= factor * min(score.loss for score in by_name.values())
        for by_name in scores.values()
        if name in by_name
    ]
    return statistics.fmean(within)


# --- text ----------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def task_table(scores: Scores) -> str:
    rows = []
    for name, by_name in scores.items():
        task, best = tasks.TASKS[name], by_name[BEST_ADAMW]
        seen = "yes" if task.tuned_on else "no"
        size = f"{task.n_steps} x {task.batch_size}"
        rate, decay = best.setting.split()
        rows.append([name, task.about, size, seen, f"{rate}, {decay}", _loss(best)])
    header = ["task", "what", "steps x batch", "tuned on", "best AdamW: rate, decay", "its loss"]
    return markdown_table(header, rows)


def auto_table(scores: Scores, name: str = "auto") -> str:
    rows = []
    for task, by_name in scores.items():
        if name not in by_name:
            continue
        mine, best = by_name[name], by_name[BEST_ADAMW]
        accuracies = [f"{100 * s.accuracy:.2f}" if s.accuracies else "" for s in (best, mine)]
        rows.append(
            [task, _loss(best), _loss(mine), f"{ratio(scores, task, name):.3f}", *accuracies]
        )
    header = ["task", "best AdamW", name, "ratio", "accuracy, AdamW", f"accuracy, {name}"]
    return markdown_table(header, rows)


def _loss(score: Score) -> str:
    return f"{score.loss:.4g} (± {100 * score.spread:.1f} %)"


def ratio_table(scores: Scores) -> str:
    """All contestants on all tasks, relative to the best AdamW, by rising geometric mean."""
    groups: dict[str, Callable[[str], bool]] = {
        "all": lambda task: True,
        "tuned on": lambda task: tasks.TASKS[task].tuned_on,
        "unseen": lambda task: not tasks.TASKS[task].tuned_on,
        "without regression": lambda task: task != "regression",
    }
    rows = []
    for name in contestants_of(scores):
        means = [
            geometric_mean([ratio(scores, task, name) for task in scores if belongs(task)])
            for belongs in groups.values()
        ]
        rows.append((means[0], name, means, [ratio(scores, task, name) for task in scores]))
    header = ["contestant", *scores, *groups]
    cells = [
        [name, *map(_ratio, ratios), *map(_ratio, means)] for _, name, means, ratios in sorted(rows)
    ]
    return markdown_table(header, cells)


def _ratio(value: float) -> str:
    if math.isnan(value):
        return "not run"
    return f"{value:.2f}" if value < 100 else "failed"


def profile_table(scores: Scores, factors: Sequence[float] = (1.0, 1.02, 1.1, 1.25, 1.5, 2)) -> str:
    rows = [
        [name, *(f"{100 * profile(scores, name, factor):.0f} %" for factor in factors)]
        for name in contestants_of(scores)
    ]
    return markdown_table(["contestant", *(f"within {f:g} x" for f in factors)], rows)


def failures(scores: Scores) -> list[str]:
    """Returns the contestants and tasks that ended far above the best AdamW."""
    return [
        f"{name} on {task}: {by_name[name].loss:.4g}, {_ratio(ratio(scores, task, name))} times"
        for task, by_name in scores.items()
        for name in by_name
        if ratio(scores, task, name) > FAILED
    ]


def write_section(page: pathlib.Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- name -->` and `<!-- /name -->` in a page."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    content = page.read_text()
    if start not in content or end not in content:
        raise ValueError(f"{page} has no section {start} ... {end}. Add the two lines to it.")
    block = f"{start}\n{text}\n{end}"
    pattern = re.escape(start) + ".*?" + re.escape(end)
    page.write_text(re.sub(pattern, lambda _: block, content, flags=re.DOTALL))


# --- pictures ------------------------------------------------------------------------------


def draw_ratios(scores: Scores, path: pathlib.Path) -> None:
    """Draws all contestants on all tasks, relative to the best AdamW."""
    from matplotlib import pyplot

    names = [name for name in contestants_of(scores) if name != BEST_ADAMW]
    figure, axes = pyplot.subplots(figsize=(10, 4.5))
    for name in names:
        ratios = [min(ratio(scores, task, name), 4) for task in scores]
        style = (
            {"color": "black", "s": 70, "zorder": 3} if name == "auto" else {"s": 25, "alpha": 0.7}
        )
        axes.scatter(range(len(scores)), ratios, label=name, **style)
    axes.axhline(1, color="grey", lw=1)
    axes.set_yscale("log")
    axes.set_yticks([0.5, 0.7, 1, 1.5, 2, 4], ["0.5", "0.7", "1", "1.5", "2", "4 or more"])
    axes.set_xticks(range(len(scores)), list(scores), rotation=30, ha="right")
    axes.set_ylabel("loss / loss of the best AdamW")
    axes.legend(fontsize=7, ncol=2)
    _save(figure, path)


def draw_profile(scores: Scores, path: pathlib.Path) -> None:
    """Draws the share of tasks within a factor of the best of all."""
    import numpy as np
    from matplotlib import pyplot

    factors = np.geomspace(1, 4, 200)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in contestants_of(scores):
        style = {"color": "black", "lw": 2.5} if name == "auto" else {"lw": 1.2}
        if name == BEST_ADAMW:
            style = {"color": "grey", "lw": 2, "ls": "--"}
        axes.plot(factors, [profile(scores, name, f) for f in factors], label=name, **style)
    axes.set_xscale("log")
    axes.set_xticks([1, 1.25, 1.5, 2, 3, 4], ["1", "1.25", "1.5", "2", "3", "4"], minor=False)
    axes.set_xlabel("factor of the best of all contestants")
    axes.set_ylabel("share of tasks")
    axes.legend(fontsize=7)
    _save(figure, path)


def _save(figure: Any, path: pathlib.Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
