"""Random histories of a run: scores, files and points always belong together.

A trainer saves, crashes, returns to an earlier step, restarts with another setting; steps are
damaged and lost; an evaluator is killed and restarted, also while training goes on. The only weight
of the model is its score, so that whatever is kept can be compared with what it claims to be.
"""

import json
import os
import random
import shutil
import types
import uuid

import jax
import jax.numpy as jnp
import optax
import pytest

from support import events
from support.killed import Killed, kill_at
from tekoa import store
from tekoa.bridges.functions import model_fns
from tekoa.core import step as steps
from tekoa.estimator.cli.flags import parse
from tekoa.estimator.modes import watch
from tekoa.estimator.report.events import read_curves
from tekoa.estimator.run import run
from tekoa.extensions import tensorboard
from tekoa.extensions.best_files import BestFileWriter
from tekoa.extensions.checkpoint_files import CheckpointFileReader, CheckpointFileWriter
from tekoa.hosts.signals import StopFlag
from tekoa.loop.checkpoint import Summary
from tekoa.store import errors
from tekoa.store.commit import durable, identity, paths
from tekoa.store.transfer import copy
from tekoa.store.transfer.best import BestCopies

FNS = model_fns({"w": jnp.zeros(())}, lambda params, x: x * params["w"])
STATE = steps.init_state(FNS, optax.sgd(1.0), jax.random.key(0), inputs=(jnp.ones((1,)),))
# The changes that an evaluator makes to its files.
CHANGES = (
    (durable, "replace"),
    (copy, "copy_step"),
    (watch.Evaluations, "append"),
    (os, "rename"),
)
# What happens how often.
WEIGHTS = {
    "train": 6,
    "evaluate": 5,
    "restart": 1,
    "lose_the_newest_steps": 2,
    "damage_the_newest_steps": 2,
    "set_the_clock": 1,
    "tear_the_points_of_the_evaluator": 2,
}


class Trainer:
    """One start of a training program."""

    def __init__(self, directory):
        self.start = uuid.uuid4().hex
        reader = CheckpointFileReader(directory, "model")
        restored = reader.restore(STATE)
        self.step = 0 if restored is None else int(restored.state.step)
        self._resumed_from = "" if restored is None else restored.commit
        self._points = tensorboard.TensorBoardWriter(directory / "train")
        self._files = CheckpointFileWriter(directory, keep=4)
        self._best = BestFileWriter(directory, "score", mode="max", group="train", keep=2)

    def train(self, n_steps, score):
        self.step += n_steps
        checkpoint = Summary(
            state=STATE.replace(params={"w": jnp.float32(score)}, step=jnp.int32(self.step)),
            step=self.step,
            loss=jnp.float32(0),
            grads=None,
            n_completed_steps=n_steps,
            elapsed_time=1.0,
            resumed_from=self._resumed_from,
            metrics={"train": {"score": score}},
        )
        for stage in (self._points, self._best, self._files):
            stage(checkpoint)
        self._files.wait()
        self._best.wait()

    def end(self):
        for writer in (self._points, self._best, self._files):
            writer.close()


def score_of(directory, step=None):
    return float(store.load(directory, step=step)["model_params"]["w"])


class History:
    """A run directory to which random things happen."""

    def __init__(self, directory, seed, patch):
        self.directory, self.random = directory, random.Random(seed)
        self.trainer, self.log = None, []
        # What is tested is the order of changes; waiting for the disk would take most of the time.
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(identity, "start_id", lambda: self.trainer.start if self.trainer else "")
        self.clock = 1_700_000_000.0
        clock = types.SimpleNamespace(
            time=lambda: self.clock, time_ns=lambda: int(self.clock * 1e9)
        )
        patch.setattr(tensorboard, "time", clock)
        # The score of every commit, and those that were measured.
        self.scores, self.measured = {}, []
        # The step from which each start resumed, in order, and the start of every commit.
        self.resumed_from, self.starts = {}, {}

    def go_on(self, n_actions):
        for _ in range(n_actions):
            (name,) = self.random.choices(list(WEIGHTS), WEIGHTS.values())
            self.log.append(name)
            getattr(self, name)()
            self.check_best_of_the_trainer()
            self.check_points_of_the_trainer()
        self.end()

    @property
    def steps(self):
        return paths.list_steps(self.directory)

    def restart(self):
        self.end()
        try:
            self.trainer = Trainer(self.directory)
        except errors.NothingUsableError:
            # All steps are damaged: someone removes them and starts from scratch.
            for path in self.directory.glob("checkpoint_*"):
                shutil.rmtree(path)
            self.trainer = Trainer(self.directory)

    def train(self):
        if self.trainer is None:
            self.restart()
        self.clock += 1
        # Float32 holds it exactly, and equal scores are frequent.
        score = self.random.randint(-8, 8) / 4
        self.resumed_from.setdefault(self.trainer.start, self.trainer.step)
        self.trainer.train(self.random.randint(1, 2), score)
        path = paths.step_dir(self.directory, self.trainer.step)
        digest = identity.commit_id(path).digest
        self.scores[digest], self.starts[digest] = score, self.trainer.start

    def end(self):
        if self.trainer is not None:
            self.trainer.end()
            self.trainer = None

    def lose_the_newest_steps(self):
        self.end()
        for step in self.steps[-self.random.randint(1, 2) :]:
            shutil.rmtree(paths.step_dir(self.directory, step))

    def damage_the_newest_steps(self):
        self.end()
        for step in self.steps[-self.random.randint(1, 2) :]:
            name = self.random.choice([paths.MANIFEST, paths.INDEX])
            (paths.step_dir(self.directory, step) / name).write_bytes(b"damaged")

    def set_the_clock(self):
        self.clock += self.random.randint(-1000, 1000)

    def tear_the_points_of_the_evaluator(self):
        files = sorted((self.directory / "eval").glob("events*"))
        if files:
            files[-1].write_bytes(files[-1].read_bytes()[: -self.random.randint(1, 100)])

    def evaluate(self):
        """Evaluates all steps, or until it is killed, while training goes on."""
        meanwhile = self.random.choices(
            [self.train, self.restart, self.damage_the_newest_steps], k=2
        )
        n = self.random.choice([None, self.random.randint(1, 16)])

        def evaluate(path, stop_flag):
            value = score_of(path)
            self.measured.append(value)
            if meanwhile and self.random.random() < 0.3:
                action = meanwhile.pop()
                self.log.append(f"during the evaluation: {action.__name__}")
                action()
            return {"score": value}

        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, n, CHANGES, is_change=lambda args: "eval" in str(args[:2]))
            (self.directory / "train_end.json").write_text('{"step": 0}')
            flags = ["--save_high=score", "--save_low=score", "--max_save=2"]
            _, config = parse(["--module_imp=mnist", f"--model_dir={self.directory}", *flags])
            watcher = None
            try:
                watcher = watch.Watcher(run.open_run(config), evaluate, StopFlag())
                watcher.run(lambda step, metrics: None)
            except Killed:
                self.log.append("killed")
                if watcher is not None:
                    watcher.close()
                return
        self.check_points()
        self.check_best_of_the_evaluator()

    def check_points(self):
        shown = read_points(self.directory / "eval", "eval/score")
        curve = read_curves(self.directory / "eval").get("eval/score", [])
        assert [step for step, _ in shown] == sorted({step for step, _ in shown})
        assert shown == [(point.step, point.value) for point in curve]
        for point in curve:
            assert point.value == self.scores[point.commit]
            starts = list(self.resumed_from)
            later = starts[starts.index(self.starts[point.commit]) + 1 :]
            assert all(self.resumed_from[start] >= point.step for start in later)
        # What is there to be read has its own point.
        by_step = {point.step: point.commit for point in curve}
        for info in store.inspect(self.directory):
            if not info.problem:
                digest = identity.commit_id(paths.step_dir(self.directory, info.step)).digest
                assert by_step[info.step] == digest

    def check_best_of_the_evaluator(self):
        if not self.measured:
            return
        record = self.directory / "eval" / watch.RECORD
        # There is none if the evaluator was killed before its first record.
        lines = record.read_text().splitlines() if record.exists() else []
        recorded = [self.scores[json.loads(line)["commit"]["digest"]] for line in lines]
        for name, mode, best in (("high_score", "max", max), ("low_score", "min", min)):
            directory = self.directory / "eval" / name
            copies = BestCopies(directory, mode=mode, keep=2)
            kept = {step: score_of(directory, step) for step in paths.list_steps(directory)}
            assert copies.scores == kept
            assert len(kept) <= 2
            if not kept and not lines:
                continue
            value = float((directory / "score").read_text())
            assert value == score_of(directory)
            # An evaluator may be killed after the copy and before the record.
            assert value in self.measured
            assert value == best([value, *recorded])

    def check_best_of_the_trainer(self):
        directory = self.directory / "high_train_score"
        kept = store.inspect(directory) if directory.exists() else []
        for info in kept:
            assert info.metrics["train/score"] == score_of(directory, info.step)
        if kept:
            best = max(self.scores.values())
            assert float((directory / "score").read_text()) == score_of(directory) == best

    def check_points_of_the_trainer(self):
        shown = read_points(self.directory / "train", "train/score")
        assert [step for step, _ in shown] == sorted({step for step, _ in shown})
        curve = read_curves(self.directory / "train").get("train/score", [])
        starts = {point.step: point.commit for point in curve}
        for info in store.inspect(self.directory) if self.steps else []:
            if not info.problem:
                assert dict(shown)[info.step] == score_of(self.directory, info.step)
                commit = identity.commit_id(paths.step_dir(self.directory, info.step))
                assert starts[info.step] == f"start:{commit.start}"


def read_points(directory, tag):
    return events.read_points(directory).get(tag, []) if directory.exists() else []


def run_history(directory, seed, n_actions):
    with pytest.MonkeyPatch.context() as patch:
        history = History(directory, seed, patch)
        try:
            history.go_on(n_actions)
        except Exception as error:
            error.add_note(f"Seed {seed}: {', '.join(history.log)}")
            raise


@pytest.mark.parametrize("seed", range(2))
def test_scores_files_and_points_belong_together(tmp_path, seed):
    run_history(tmp_path, seed, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 105))
def test_scores_files_and_points_belong_together_in_long_histories(tmp_path, seed):
    run_history(tmp_path, seed, 150)
