import pathlib
import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from tekoa import store
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError, parse
from tekoa.estimator.model_file.program import program_of
from tekoa.estimator.modes import watch
from tekoa.estimator.run import run
from tekoa.store.commit import paths
from tekoa.store.formats import step as step_lib
from tekoa.testing import count_compilations


class NeverStop:
    def is_set(self):
        return False

    is_requested = is_set


def watcher(directory, evaluate, *flags, stop_flag=None):
    _, config = parse(["--module_imp=mnist", f"--model_dir={directory}", *flags])
    return watch.Watcher(run.open_run(config), evaluate, stop_flag or NeverStop())


def ignore(step, metrics):
    pass


def points(directory, tag):
    events = event_accumulator.EventAccumulator(str(directory))
    events.Reload()
    return {point.step: point.value for point in events.Scalars(tag)}, len(events.Scalars(tag))


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
    class Killed(BaseException):
        pass

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


def test_label_with_a_slash_names_directory_and_tags(copied):
    watcher(copied, lambda *_: {"a": 1.0}, "--eval_label=dev/one").run(ignore)
    assert sorted(points(copied / "dev" / "one", "dev/a")[0]) == [0, 10, 20, 25]


def test_command_evaluates_a_finished_run_and_exits(copied, capsys):
    flags = ["--eval_pattern=digits://split=test", "--save_high=test_accuracy"]
    assert main.main(["eval_wait", "mnist", f"--model_dir={copied}", *flags]) == 0
    assert capsys.readouterr().out.count("test_accuracy at step") == 4


def test_unknown_metric_is_a_usage_error_and_nothing_is_recorded(copied):
    mistyped = watcher(copied, lambda *_: {"a": 1.0}, "--save_high=acuracy")
    with pytest.raises(UsageError, match=r"unknown metric: acuracy. Available metrics: a\."):
        mistyped.run(ignore)
    assert not (copied / "eval" / watch.NOTE).exists()


def test_waiting_is_reported_once(tmp_path, capsys):
    class StopLater(NeverStop):
        n_polls = 0

        def is_requested(self):
            self.n_polls += 1
            return self.n_polls > 20

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
    flags = [f"--model_dir={tmp_path}", "--noprogress", "--eval_pattern=dummy://", *flags]
    model = str(pathlib.Path(__file__).parents[1] / model)
    train = ["--train_pattern=dummy://", "--max_train_steps=4", "--check_every_steps=1"]
    train += ["--train_batch_size=8", "--steps_per_dispatch=1"]
    assert main.main(["train", model, *flags, *train]) == 0

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

    watch.Watcher(opened, count, NeverStop()).run(ignore)
    assert n_compiled[0] > 0
    assert n_compiled[1:] == [0, 0, 0, 0]
    assert n_opens == (original is not None)
