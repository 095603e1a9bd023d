"""Results on disk, one JSON line per run, so that an interrupted bench continues."""

import contextlib
import json
import math
import pathlib
import time
from typing import Any

from . import contestants, tasks, training

# Raise it when a model, its data or the evaluation changes: earlier results no longer count.
TASKS_VERSION = 1


class NotTrainedError(LookupError):
    """A result is not stored, and nothing is to be trained."""


class Results:
    """Returns the outcome of any run, after training it if it is not stored.

    Args:
        path: The file of results; it need not exist.
        stored_only: Whether a missing result is a `NotTrainedError`.
    """

    def __init__(self, path: pathlib.Path, stored_only: bool = False):
        self.path = path
        self.stored_only = stored_only
        self.lines: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                self.lines[json.dumps(record["key"], sort_keys=True)] = record
        self._trainers: dict[tasks.Task, training.Trainer] = {}
        self._prepared: dict[Any, training.MakeOptimizer] = {}

    def key(
        self, task: tasks.Task, contestant: contestants.Contestant, seed: int, **run: Any
    ) -> dict[str, Any]:
        return {
            "task": task.name,
            "model": task.about,
            "tasks": TASKS_VERSION,
            "n_steps": task.n_steps,
            "batch_size": task.batch_size,
            "contestant": contestant.name,
            "numbers": dict(contestant.numbers),
            "version": contestant.version,
            "seed": seed,
        } | run

    def find(self, *args: Any, **run: Any) -> dict[str, Any] | None:
        """Returns the record of a run with the arguments of `key`, or None."""
        return self.lines.get(json.dumps(self.key(*args, **run), sort_keys=True))

    def get(
        self, task: tasks.Task, contestant: contestants.Contestant, seed: int, **run: Any
    ) -> dict[str, Any]:
        """Returns the record of a run, after training if it is not on disk."""
        record = self.find(task, contestant, seed, **run)
        if record is None and self.stored_only:
            raise NotTrainedError(f"No result of {contestant.name} on {task.name}, seed {seed}.")
        if record is None:
            record = self._train(task, contestant, seed, run)
        return record

    def _train(self, task, contestant, seed, run):
        key = self.key(task, contestant, seed, **run)
        started = time.perf_counter()
        trainer = self.trainer(task)
        program = task, contestant.prepare
        if program not in self._prepared:
            self._prepared[program] = contestant.prepare(trainer)
        outcome = trainer.run(
            self._prepared[program],
            seed,
            dict(contestant.numbers),
            eval_params=contestant.eval_params,
            **run,
        )
        record = {
            "key": key,
            "loss": outcome.loss if math.isfinite(outcome.loss) else None,
            "accuracy": outcome.accuracy,
            "seconds": round(time.perf_counter() - started, 1),
        }
        self.lines[json.dumps(key, sort_keys=True)] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{task.name:12} {contestant.name:18} seed {seed} {run or ''} {record['loss']}"
            f" {record['accuracy']} ({record['seconds']} s)",
            flush=True,
        )
        return record

    def trainer(self, task: tasks.Task) -> training.Trainer:
        """Returns the trainer of a task, and forgets those of other tasks."""
        if task not in self._trainers:
            self._trainers.clear()
            self._prepared.clear()
            self._trainers[task] = training.Trainer(task)
        return self._trainers[task]


def best_adamw(
    results: Results, task: tasks.Task, seeds: tuple[int, ...]
) -> tuple[contestants.Contestant, list[dict[str, Any]]]:
    """Returns the best setting of AdamW's grid and its records.

    All rates and decays run with the first seed, further rates while the best is at the edge.
    Settings within 30 % of the best there run with the other seeds, and the mean counts. With
    `stored_only`, those that lack a seed are left out.
    """

    def loss(record):
        return math.inf if record["loss"] is None else record["loss"]

    def first(rate):
        settings = [contestants.adamw_setting(rate, decay) for decay in contestants.DECAYS]
        return [(setting, results.get(task, setting, seeds[0])) for setting in settings]

    by_rate = {rate: first(rate) for rate in contestants.RATES}
    while True:
        rates = sorted(by_rate)
        best = min(rates, key=lambda rate: min(loss(r) for _, r in by_rate[rate]))
        place = contestants.WIDER.index(best) + {rates[0]: -1, rates[-1]: 1}.get(best, 0)
        if not 0 <= place < len(contestants.WIDER) or contestants.WIDER[place] in by_rate:
            break
        by_rate[contestants.WIDER[place]] = first(contestants.WIDER[place])
    runs = [pair for pairs in by_rate.values() for pair in pairs]
    limit = 1.3 * min(loss(record) for _, record in runs)
    finalists = []
    for setting, record in sorted(runs, key=lambda run: loss(run[1])):
        with contextlib.suppress(NotTrainedError):
            if loss(record) <= limit:
                records = [results.get(task, setting, seed) for seed in seeds]
                finalists.append((setting, records))
    return min(finalists, key=lambda pair: sum(map(loss, pair[1])))
