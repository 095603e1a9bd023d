"""A trainer and an evaluator on one directory, each killed and started again."""

import json
import random
import re
import sys
import time

import numpy as np
import pytest

from support import events, processes
from tekoa import load_checkpoint
from tekoa.store.commit import paths
from tekoa.testing import assert_trees_equal

N_STEPS, EVERY = 240, 10
TRAIN = ["train", "--random_seed=5", f"--max_train_steps={N_STEPS}", f"--check_every_steps={EVERY}"]
WATCH = [
    "eval_wait",
    f"--max_train_steps={N_STEPS}",
    "--eval_pattern=test",
    "--check_ckpt_every_secs=1",
    "--save_high=accuracy",
    "--save_low=cost",
    "--max_save=1",
]
SLOWLY = ["--module_config.step_seconds=0.004", "--module_config.eval_seconds=0.05"]
ALL_STEPS = list(range(0, N_STEPS + 1, EVERY))


def command(words, directory, *flags):
    mode, *rest = words
    model = str(processes.TINY_MODEL)
    start = [sys.executable, "-m", "tekoa", mode, model, f"--model_dir={directory}"]
    return [*start, *rest, *flags]


class Victim:
    """A process that is killed at random moments, a given number of times."""

    def __init__(self, arguments, progress, log, *, n_kills, seed):
        self._arguments, self._progress, self._log = arguments, progress, log
        self._n_kills, self._rng = n_kills, random.Random(seed)
        self.n_killed, self.is_done = 0, False
        self._start()

    def _start(self):
        with self._log.open("a") as out:
            self._process = processes.start(self._arguments, out)
        self._target = self._progress() + self._rng.randint(1, 4)

    def look(self):
        code = self._process.poll()
        if code is not None:
            assert code == 0, f"Ended with {code}."
            self.is_done = True
        elif self.n_killed < self._n_kills and self._progress() >= self._target:
            time.sleep(self._rng.uniform(0, 0.15))
            self._process.kill()
            self._process.wait()
            self.n_killed += 1
            self._start()

    def end(self):
        self._process.kill()
        self._process.wait()


def last_evaluated(directory):
    try:
        return ALL_STEPS.index(
            paths.parse_step((directory / "eval/last_evaluated_ckpt").read_text().split("/")[-1])
        )
    except FileNotFoundError:
        return -1


def train_and_watch(directory, log, *flags, n_kills):
    """Runs both processes to their end and returns how often each was killed."""
    trainer = Victim(
        command(TRAIN, directory, *SLOWLY, *flags),
        lambda: max(paths.list_steps(directory), default=-EVERY) // EVERY,
        log,
        n_kills=n_kills,
        seed=11,
    )
    watcher = Victim(
        command(WATCH, directory, *SLOWLY),
        lambda: last_evaluated(directory),
        log,
        n_kills=n_kills,
        seed=12,
    )
    try:
        deadline = time.monotonic() + 300
        while not (trainer.is_done and watcher.is_done):
            assert time.monotonic() < deadline, log.read_text()
            trainer.is_done or trainer.look()
            watcher.is_done or watcher.look()
            time.sleep(0.01)
    finally:
        trainer.end()
        watcher.end()
    return trainer.n_killed, watcher.n_killed


def points(directory):
    """Returns what TensorBoard shows, without timings."""
    curves = events.read_points(directory)
    return {
        tag: curve
        for tag, curve in curves.items()
        if not tag.endswith("seconds_per_step") and not tag.startswith("system/")
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    for words in (TRAIN, WATCH):
        flags = ["--max_ckpt=1000"] if words is TRAIN else []
        with (directory.parent / "undisturbed.log").open("w") as out:
            assert processes.start(command(words, directory, *flags), out).wait(120) == 0
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("max_ckpt", "n_kills"), [(1000, 3), (3, 2)])
def test_kills_leave_no_trace(undisturbed, tmp_path, max_ckpt, n_kills):
    run, log = tmp_path / "run", tmp_path / "log"
    assert min(train_and_watch(run, log, f"--max_ckpt={max_ckpt}", n_kills=n_kills)) >= 1
    output = log.read_text()

    ours, theirs = load_checkpoint(run), load_checkpoint(undisturbed)
    assert int(ours["step"]) == N_STEPS
    for item in ("model_params", "optimizer_state"):
        assert_trees_equal(ours[item], theirs[item])
    assert points(run / "train") == points(undisturbed / "train")

    # Each checkpoint was evaluated once, with the undisturbed run's result, or reported as removed.
    seen, expected = points(run / "eval"), points(undisturbed / "eval")
    evaluated = [step for step, _ in seen["eval/accuracy"]]
    for tag, values in expected.items():
        assert seen[tag] == [(step, value) for step, value in values if step in evaluated]
    assert set(paths.list_steps(run)) <= set(evaluated)
    reported = re.findall(r"Steps \[(.*)\] were removed before they could be evaluated", output)
    missed = {int(step) for line in reported for step in line.split(", ")}
    # A step that was listed and then removed before the evaluator could hold it.
    missed |= {int(step) for step in re.findall(r"Step (\d+) cannot be evaluated", output)}
    # What was removed before the first evaluation need not be reported: a killed evaluator knows
    # only what it has evaluated.
    missed = {step for step in missed if step > evaluated[0]}
    assert missed == {n for n in ALL_STEPS if n > evaluated[0]} - set(evaluated)
    if max_ckpt == 1000:
        assert evaluated == ALL_STEPS

    for name, tag, better in [
        ("high_accuracy", "eval/accuracy", max),
        ("low_cost", "eval/cost", min),
    ]:
        best = better(value for _, value in seen[tag])
        first = next(step for step, value in seen[tag] if value == best)
        assert np.float32((run / "eval" / name / "score").read_text()) == np.float32(best)
        assert paths.list_steps(run / "eval" / name) == [first]
        best_step, same_step = (
            load_checkpoint(run / "eval" / name),
            load_checkpoint(undisturbed, step=first),
        )
        assert_trees_equal(best_step["model_params"], same_step["model_params"])

    assert json.loads((run / "train_end.json").read_text()) == {"step": N_STEPS}
    left = [path.name for path in run.rglob("*") if ".tmp-" in path.name or ".pin-" in path.name]
    assert not left
