import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from tekoa import store
from tekoa.estimator import cli, config, run, watch
from tekoa.store import names, steps


class NeverStop:
    def is_set(self):
        return False

    is_asked = is_set


def opened(directory, *flags):
    _, parsed = config.parse(["--module_imp=mnist", f"--model_dir={directory}", *flags])
    return run.open_run(parsed)


def points(directory, tag):
    events = event_accumulator.EventAccumulator(str(directory))
    events.Reload()
    return {point.step: point.value for point in events.Scalars(tag)}, len(events.Scalars(tag))


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_every_step_is_evaluated_once_and_the_best_kept(copied):
    scores = {0: 0.0, 10: 0.5, 20: 0.9, 25: 0.7}
    seen = []

    def evaluate(path, stop_flag):
        step = names.parse_step(path.rsplit("/", 1)[1])
        seen.append(step)
        return {"accuracy": scores[step], "loss": -scores[step]}

    flags = ["--save_high=accuracy", "--save_low=loss", "--check_ckpt_every_secs=1"]
    for _ in range(2):
        watch.Watcher(opened(copied, *flags), evaluate, NeverStop()).run(lambda *_: None)
    assert seen == [0, 10, 20, 25]
    assert names.list_steps(copied / "eval" / "high_accuracy") == [0, 10, 20]
    assert float((copied / "eval" / "high_accuracy" / "score").read_text()) == 0.9
    assert float((copied / "eval" / "low_loss" / "score").read_text()) == -0.9
    by_step, n_points = points(copied / "eval", "eval/accuracy")
    assert by_step == pytest.approx(scores)
    assert n_points == 4


def test_a_best_checkpoint_holds_all_of_the_step(copied):
    watch.Watcher(opened(copied, "--save_high=a"), lambda *_: {"a": 1.0}, NeverStop()).run(print)
    kept, original = store.load(copied / "eval" / "high_a"), store.load(copied, step=0)
    assert kept.keys() == original.keys()
    np.testing.assert_array_equal(
        kept["model_params"]["Dense_1"]["kernel"], original["model_params"]["Dense_1"]["kernel"]
    )


def test_a_watcher_killed_in_an_evaluation_does_that_step_again(copied):
    class Killed(BaseException):
        pass

    def evaluate(path, stop_flag):
        if path.endswith("_20") and not done:
            done.append(path)
            raise Killed
        return {"a": 1.0}

    done = []
    with pytest.raises(Killed):
        watch.Watcher(opened(copied), evaluate, NeverStop()).run(lambda *_: None)
    watch.Watcher(opened(copied), evaluate, NeverStop()).run(lambda *_: None)
    by_step, n_points = points(copied / "eval", "eval/a")
    assert (sorted(by_step), n_points) == ([0, 10, 20, 25], 4)
    assert not list((copied / "eval").glob(".pin-*"))


def test_removed_and_damaged_steps_are_told(copied, capsys):
    shutil.rmtree(copied / "checkpoint_10")
    (copied / "checkpoint_20" / "tekoa.manifest").unlink()

    def evaluate(path, stop_flag):
        steps.open_step(path)
        return {"a": 1.0}

    watch.Watcher(opened(copied), evaluate, NeverStop()).run(lambda *_: None)
    said = capsys.readouterr().out
    assert "steps [10]" in said
    assert "Step 20 cannot be evaluated" in said
    assert sorted(points(copied / "eval", "eval/a")[0]) == [0, 25]


def test_labels_nest_and_name_the_tags(copied):
    watch.Watcher(opened(copied, "--eval_label=dev/one"), lambda *_: {"a": 1.0}, NeverStop()).run(
        lambda *_: None
    )
    assert sorted(points(copied / "dev" / "one", "dev/a")[0]) == [0, 10, 20, 25]


def test_command_watches_a_finished_run_to_its_end(copied, capsys):
    flags = ["--eval_pattern=digits://split=test", "--save_high=test_accuracy"]
    assert cli.main(["eval_wait", "mnist", f"--model_dir={copied}", *flags]) == 0
    assert capsys.readouterr().out.count("test_accuracy at step") == 4


def test_a_metric_that_is_not_there_is_a_mistake_and_nothing_counts_as_evaluated(copied):
    watcher = watch.Watcher(
        opened(copied, "--save_high=acuracy"), lambda *_: {"a": 1.0}, NeverStop()
    )
    with pytest.raises(config.UsageError, match=r"no metric acuracy .* there are a"):
        watcher.run(lambda *_: None)
    assert not (copied / "eval" / watch.NOTE).exists()


def test_waiting_is_told_once(tmp_path, capsys):
    class After(NeverStop):
        n_looks = 0

        def is_asked(self):
            self.n_looks += 1
            return self.n_looks > 20

    flags = ["--check_ckpt_every_secs=0"]
    watch.Watcher(opened(tmp_path, *flags), lambda *_: {}, After()).run(lambda *_: None)
    assert capsys.readouterr().err.count("Waiting for the next checkpoint") == 1
