import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from support import events
from support.killed import Killed
from tekoa import store
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError, parse
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.modes import watch
from tekoa.estimator.report.events import read_curves
from tekoa.estimator.run import run
from tekoa.extensions import run_record
from tekoa.hosts.signals import StopFlag
from tekoa.store import errors
from tekoa.store.commit import identity, lease, paths
from tekoa.store.formats import step as step_lib
from tekoa.testing import count_compilations


def watcher(directory, evaluate, *flags, stop_flag=None):
    _, config = parse(["--module_imp=mnist", f"--model_dir={directory}", *flags])
    return watch.Watcher(run.open_run(config), evaluate, stop_flag or StopFlag())


def ignore(step, metrics):
    pass


def points(directory, tag):
    curve = events.read_points(directory)[tag]
    return dict(curve), len(curve)


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_every_step_is_evaluated_once_and_the_best_are_kept(copied):
    scores = {0: 0.0, 10: 0.5, 20: 0.9, 25: 0.7}
    evaluated = []

    def evaluate(path, stop_flag):
        step = paths.parse_step(path.rsplit("/", 1)[1])
        evaluated.append(step)
        return {"accuracy": scores[step], "loss": -scores[step]}

    flags = ["--save_high=accuracy", "--save_low=loss", "--check_ckpt_every_secs=1"]
    for _ in range(2):
        watcher(copied, evaluate, *flags).run(ignore)
    assert evaluated == [0, 10, 20, 25]
    assert paths.list_steps(copied / "eval" / "high_accuracy") == [0, 10, 20]
    assert float((copied / "eval" / "high_accuracy" / "score").read_text()) == 0.9
    assert float((copied / "eval" / "low_loss" / "score").read_text()) == -0.9
    by_step, n_points = points(copied / "eval", "eval/accuracy")
    assert by_step == pytest.approx(scores)
    assert n_points == 4


def test_best_checkpoint_is_a_complete_copy(copied):
    watcher(copied, lambda *_: {"a": 1.0}, "--save_high=a").run(ignore)
    copy, original = store.load(copied / "eval" / "high_a"), store.load(copied, step=0)
    assert copy.keys() == original.keys()
    np.testing.assert_array_equal(
        copy["model_params"]["Dense_1"]["kernel"], original["model_params"]["Dense_1"]["kernel"]
    )


def test_watcher_killed_during_an_evaluation_repeats_that_step(copied):
    def evaluate(path, stop_flag):
        if path.endswith("_20") and not killed:
            killed.append(path)
            raise Killed
        return {"a": 1.0}

    killed = []
    with pytest.raises(Killed):
        watcher(copied, evaluate).run(ignore)
    watcher(copied, evaluate).run(ignore)
    by_step, n_points = points(copied / "eval", "eval/a")
    assert (sorted(by_step), n_points) == ([0, 10, 20, 25], 4)
    assert not list((copied / "eval").glob(".pin-*"))


def test_the_last_step_is_evaluated_though_training_ends_while_steps_are_listed(
    copied, tmp_path, monkeypatch
):
    hidden = {name: tmp_path / name for name in ("checkpoint_25", "train_end.json")}
    for name, path in hidden.items():
        (copied / name).rename(path)
    list_steps, evaluated = paths.list_steps, []

    def list_and_end(directory):
        steps = list_steps(directory)
        while directory == copied and evaluated == [0, 10, 20] and hidden:
            name, path = hidden.popitem()
            path.rename(copied / name)
        return steps

    monkeypatch.setattr(paths, "list_steps", list_and_end)

    def evaluate(path, stop_flag):
        evaluated.append(paths.parse_step(path.rsplit("/", 1)[1]))
        return {"a": 1.0}

    watcher(copied, evaluate, "--check_ckpt_every_secs=0").run(ignore)
    assert evaluated == [0, 10, 20, 25]


def test_a_step_that_training_removes_meanwhile_is_evaluated(copied):
    def evaluate(path, stop_flag):
        step = path.rsplit("/", 1)[1]
        shutil.rmtree(copied / step)
        return {"step": float(store.load(path)["step"])}

    watcher(copied, evaluate).run(ignore)
    by_step, _ = points(copied / "eval", "eval/step")
    assert by_step == {0: 0, 10: 10, 20: 20, 25: 25}


def test_removed_and_damaged_steps_are_reported(copied, capsys):
    shutil.rmtree(copied / "checkpoint_10")
    (copied / "checkpoint_20" / "tekoa.manifest").unlink()

    def evaluate(path, stop_flag):
        step_lib.open_step(path)
        return {"a": 1.0}

    watcher(copied, evaluate).run(ignore)
    out = capsys.readouterr().out
    assert "Steps [10] were removed" in out
    assert "Step 20 cannot be evaluated" in out
    assert sorted(points(copied / "eval", "eval/a")[0]) == [0, 25]


def test_steps_removed_after_one_that_cannot_be_evaluated_are_reported(copied, capsys):
    (copied / "checkpoint_0" / "tekoa.manifest").unlink()
    shutil.rmtree(copied / "checkpoint_10")

    def evaluate(path, stop_flag):
        step_lib.open_step(path)
        return {"a": 1.0}

    watcher(copied, evaluate).run(ignore)
    out = capsys.readouterr().out
    assert "Step 0 cannot be evaluated" in out
    assert "Steps [10] were removed" in out


def test_command_evaluates_a_finished_run_and_exits(copied, capsys):
    flags = ["--eval_pattern=digits://split=test", "--save_high=test_accuracy"]
    assert main.main(["eval_wait", "mnist", f"--model_dir={copied}", *flags]) == 0
    assert capsys.readouterr().out.count("test_accuracy at step") == 4


def test_unknown_metric_is_a_usage_error_and_nothing_is_recorded(copied):
    mistyped = watcher(copied, lambda *_: {"a": 1.0}, "--save_high=acuracy")
    with pytest.raises(UsageError, match=r"unknown metric: acuracy. Available metrics: a\."):
        mistyped.run(ignore)
    mistyped.close()
    assert not (copied / "eval").exists()


def test_waiting_is_reported_once(tmp_path, capsys):
    waiting = watcher(tmp_path, None, "--check_ckpt_every_secs=0", stop_flag=StopLater())
    waiting.run(ignore)
    assert capsys.readouterr().err.count("Waiting for the next checkpoint") == 1


FORMS = {
    "short": ("tiny_model.py",),
    "short, on a mesh": ("tiny_model.py", "--mesh=data=4,model=2"),
    "long": ("long_model.py",),
}


@pytest.mark.parametrize("arguments", FORMS.values(), ids=FORMS)
def test_later_checkpoints_compile_nothing_and_open_no_data(tmp_path, arguments):
    model, *flags = arguments
    flags = [f"--model_dir={tmp_path}", *flags]
    model = str(pathlib.Path(__file__).parents[1] / model)
    train = ["--train_pattern=dummy://", "--max_train_steps=4", "--check_every_steps=1"]
    train += ["--train_batch_size=8", "--steps_per_dispatch=1"]
    assert main.main(["train", model, "--noprogress", *flags, *train]) == 0

    flags += ["--noprogress", "--eval_pattern=dummy://"]
    opened = run.open_run(parse([f"--module_imp={model}", *flags])[1])
    n_opens = 0

    def open_data(*args, **kwargs):
        nonlocal n_opens
        n_opens += 1
        return original(*args, **kwargs)

    original = getattr(opened.module, "open_data", None)
    if original is not None:
        opened.module.open_data = open_data
    evaluate = program_of(opened, "eval_wait").evaluation()
    n_compiled = []

    def count(path, stop_flag):
        with count_compilations() as compiled:
            metrics = evaluate(path, stop_flag)
        n_compiled.append(compiled.total)
        return metrics

    watch.Watcher(opened, count, StopFlag()).run(ignore)
    assert n_compiled[0] > 0
    assert n_compiled[1:] == [0, 0, 0, 0]
    assert n_opens == (original is not None)


class StopLater:
    """Stops an evaluator that has waited for a while."""

    n_polls = 0

    def is_requested(self):
        self.n_polls += 1
        return self.n_polls > 20

    is_set = is_requested


class History:
    """A run directory, written step by step; the value of a step is what evaluation returns."""

    def __init__(self, directory):
        self.directory = directory
        self.evaluated = []
        self._parent = ""

    def start(self, monkeypatch, name, parent=None):
        """Starts a program again, resuming from a step."""
        monkeypatch.setattr(identity, "start_id", lambda: name)
        run_record.write_start(self.directory, {}, step=parent or 0)
        self._parent = ""
        if parent is not None:
            path = paths.step_dir(self.directory, parent)
            self._parent = identity.commit_id(path).digest

    def save(self, step, value):
        with store.Store(self.directory, keep=[store.KeepEvery(1)]) as writer:
            items = {"model_params": {"value": np.float32(value)}}
            writer.save(step, items, parent=self._parent, replace=True)

    def watch(self, *flags):
        def evaluate(path, stop_flag):
            value = float(store.load(path)["model_params"]["value"])
            self.evaluated.append((paths.parse_step(path.rsplit("/", 1)[1]), value))
            return {"a": value}

        (self.directory / "train_end.json").write_text('{"step": 0}')
        watcher(self.directory, evaluate, "--max_save=1", *flags).run(ignore)

    def best(self, name):
        """Returns the score of the best copy, and the value of the model in it."""
        directory = self.directory / "eval" / name
        model = store.load(directory)["model_params"]["value"]
        return float((directory / "score").read_text()), float(model)


@pytest.fixture
def history(tmp_path):
    return History(tmp_path)


def test_a_step_made_again_is_evaluated_again_and_replaces_its_point(history, monkeypatch):
    history.start(monkeypatch, "first")
    for step, value in ((10, 1.0), (20, 5.0), (30, 6.0)):
        history.save(step, value)
    history.watch("--save_high=a")
    history.start(monkeypatch, "second", parent=10)
    history.save(20, 7.0)
    history.watch("--save_high=a")
    assert history.evaluated == [(10, 1.0), (20, 5.0), (30, 6.0), (20, 7.0)]
    assert events.read_points(history.directory / "eval") == {"eval/a": [(10, 1.0), (20, 7.0)]}
    # The best has a lower number than the best before.
    assert history.best("high_a") == (7.0, 7.0)
    (point, latest) = read_curves(history.directory / "eval")["eval/a"]
    assert point.commit == identity.commit_id(history.directory / "checkpoint_10").digest
    assert latest.commit == identity.commit_id(history.directory / "checkpoint_20").digest


def test_points_that_training_has_left_are_superseded_before_there_are_new_ones(
    history, monkeypatch, capsys
):
    history.start(monkeypatch, "first")
    for step, value in ((10, 1.0), (20, 5.0), (30, 6.0)):
        history.save(step, value)
    history.watch()
    for step in (20, 30):
        shutil.rmtree(history.directory / f"checkpoint_{step}")
    history.start(monkeypatch, "second", parent=10)
    (history.directory / "train_end.json").unlink()
    flags = ["--max_train_steps=30", "--check_ckpt_every_secs=0"]
    watcher(history.directory, None, *flags, stop_flag=StopLater()).run(ignore)
    captured = capsys.readouterr()
    line = "Training has returned to step 10: the evaluations of the steps 20, 30 are superseded.\n"
    assert captured.out == line
    # Step 30 is to be made again.
    assert "Waiting for the next checkpoint" in captured.err
    assert events.read_points(history.directory / "eval") == {"eval/a": [(10, 1.0)]}
    # An evaluator that is started again has nothing to repair.
    files = sorted((history.directory / "eval").glob("events*"))
    watcher(history.directory, None, *flags, stop_flag=StopLater()).run(ignore)
    assert sorted((history.directory / "eval").glob("events*")) == files
    assert capsys.readouterr().out == ""
    # The new history passes step 20 without a checkpoint.
    history.save(40, 7.0)
    shutil.rmtree(history.directory / "checkpoint_10")
    history.watch()
    expected = [(10, 1.0), (40, 7.0)]
    assert events.read_points(history.directory / "eval")["eval/a"] == expected


def test_a_step_that_training_leaves_during_its_evaluation_has_no_point(history, monkeypatch):
    history.start(monkeypatch, "first")
    for step in (10, 20, 30):
        history.save(step, step)
    evaluated = []

    def evaluate(path, stop_flag):
        evaluated.append(path)
        if len(evaluated) == 3:
            history.start(monkeypatch, "second", parent=10)
        return {"a": 1.0}

    (history.directory / "train_end.json").write_text('{"step": 0}')
    watcher(history.directory, evaluate).run(ignore)
    assert events.read_points(history.directory / "eval") == {"eval/a": [(10, 1.0)]}
    assert len(evaluated) == 3


def test_the_best_of_an_abandoned_history_stays_with_its_own_model(history, monkeypatch):
    history.start(monkeypatch, "first")
    for step, value in ((10, 1.0), (20, 9.0)):
        history.save(step, value)
    history.watch("--save_high=a", "--save_low=a")
    history.start(monkeypatch, "second", parent=10)
    for step, value in ((20, 0.5), (30, 8.0)):
        history.save(step, value)
    history.watch("--save_high=a", "--save_low=a")
    assert history.best("high_a") == (9.0, 9.0)
    assert history.best("low_a") == (0.5, 0.5)


def test_points_that_a_killed_evaluator_did_not_write_are_written_later(history):
    for step in (10, 20):
        history.save(step, step)
    history.watch()
    (file,) = (history.directory / "eval").glob("events*")
    file.write_bytes(file.read_bytes()[:-10])
    history.save(30, 30)
    history.watch()
    assert history.evaluated == [(10, 10), (20, 20), (30, 30)]
    expected = [(10, 10), (20, 20), (30, 30)]
    assert events.read_points(history.directory / "eval")["eval/a"] == expected


def test_evaluations_of_an_earlier_version_are_not_repeated(history):
    for step in (10, 20):
        history.save(step, step)
    history.watch()
    (history.directory / "eval" / watch.RECORD).unlink()
    history.save(30, 30)
    history.watch()
    assert history.evaluated == [(10, 10), (20, 20), (30, 30)]
    expected = [(10, 10), (20, 20), (30, 30)]
    assert events.read_points(history.directory / "eval")["eval/a"] == expected


def test_a_damaged_step_is_tried_once_and_evaluated_when_it_is_made_again(history, capsys):
    history.save(10, 1.0)
    (history.directory / "checkpoint_10" / "tekoa.manifest").write_text("damaged")
    history.watch()
    assert capsys.readouterr().out.count("Step 10 cannot be evaluated") == 1
    history.save(10, 2.0)
    history.watch()
    assert history.evaluated == [(10, 2.0)]


LABELS = ["", "..", "a/b", "../eval", "/tmp/x", "train", "save", "checkpoint_7", "a b", "\x1b[1m"]


@pytest.mark.parametrize("label", LABELS)
def test_labels_that_are_not_plain_names_are_refused(tmp_path, label, capsys):
    flags = [f"--model_dir={tmp_path}", f"--eval_label={label}", "--eval_pattern=x"]
    assert main.main(["eval_wait", "mnist", *flags]) == 2
    assert "--eval_label must be a name" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--eval_label must be a name"):
        watcher(tmp_path, None, f"--eval_label={label}")
    assert list(tmp_path.iterdir()) == []


def test_a_second_evaluator_with_the_same_label_is_refused(tmp_path, monkeypatch):
    first = watcher(tmp_path, None)
    held = (tmp_path / "eval" / lease.NAME).read_text()
    first.close()
    # As another living process would have written it.
    owner = {**json.loads(held), "pid": os.getppid(), "start": lease._process(os.getppid())[0]}
    (tmp_path / "eval").mkdir(exist_ok=True)
    (tmp_path / "eval" / lease.NAME).write_text(json.dumps(owner))
    with pytest.raises(errors.LeaseHeldError):
        watcher(tmp_path, None)
    watcher(tmp_path, None, "--eval_label=other").close()
