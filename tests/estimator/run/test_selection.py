import json
import pathlib
import types

import pytest

from tekoa import store
from tekoa.estimator.cli import flags as flags_lib
from tekoa.estimator.cli import main
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run import selection
from tekoa.store.commit import paths

TINY = str(pathlib.Path(__file__).parents[1] / "tiny_model.py")
CHECKED = ["--train_pattern=a", "--valid_pattern=b", "--check_every_steps=2", "--max_ckpt=99"]


def train(directory, *flags):
    return main.main(["train", TINY, f"--model_dir={directory}", *CHECKED, *flags])


def valid_metrics(directory, name):
    """Returns the values of a validation metric by step, from the index of every checkpoint."""
    return {
        step: json.loads((paths.step_dir(directory, step) / paths.INDEX).read_text())["metrics"][
            f"train/valid_{name}"
        ]
        for step in paths.list_steps(directory)
    }


def test_best_checkpoints_of_validation_are_kept(tmp_path):
    flags = ["--max_train_steps=8", "--save_low=loss", "--save_high=valid_accuracy", "--max_save=1"]
    assert train(tmp_path, *flags) == 0
    losses = valid_metrics(tmp_path, "loss")
    best = min(losses, key=losses.get)
    directory = tmp_path / "low_train_valid_loss"
    assert paths.list_steps(directory) == [best]
    assert float((directory / "score").read_text()) == pytest.approx(losses[best])
    assert int(store.load(directory)["step"]) == best
    assert len(paths.list_steps(tmp_path / "high_train_valid_accuracy")) == 1


def test_training_stops_early_and_stays_stopped(tmp_path, capsys):
    # No loss is above itself, so the first value stays the best.
    flags = ["--max_train_steps=40", "--early_stop=valid_loss:3:max", "--module_config.n_classes=2"]
    assert train(tmp_path, *flags) == 0
    losses = list(valid_metrics(tmp_path, "loss").items())
    stopped_at = paths.list_steps(tmp_path)[-1]
    best = max(losses, key=lambda pair: pair[1])[0]
    assert stopped_at == best + 6 < 40
    assert f"Early stopping at step {stopped_at}" in capsys.readouterr().out
    assert train(tmp_path, *flags) == 0
    assert paths.list_steps(tmp_path)[-1] == stopped_at
    assert f"Nothing to do: training stopped at step {stopped_at}." in capsys.readouterr().out


def test_training_stops_at_a_value_and_stays_stopped(tmp_path, capsys):
    assert train(tmp_path / "free", "--max_train_steps=12") == 0
    losses = valid_metrics(tmp_path / "free", "loss")
    bound = losses[6] * 1.0001
    first = min(step for step, loss in losses.items() if loss <= bound)
    assert first > 0
    # Killed before the target, it stops at the same step.
    assert train(tmp_path / "run", f"--stop_when=loss<={bound}", "--max_train_steps=2") == 0
    flags = ["--max_train_steps=12", f"--stop_when=loss<={bound}"]
    for _ in range(2):
        assert train(tmp_path / "run", *flags) == 0
        assert paths.list_steps(tmp_path / "run")[-1] == first
    out = capsys.readouterr().out
    assert f"Early stopping at step {first}: valid_loss is {losses[first]:.6g}, <=" in out
    assert "Nothing to do" in out
    # Another condition continues.
    assert train(tmp_path / "run", "--max_train_steps=12", "--stop_when=loss<=0") == 0
    assert paths.list_steps(tmp_path / "run")[-1] == 12


def test_sets_are_validated_on_their_own_schedules_and_choose_and_stop(tmp_path, capsys):
    def rows(directory):
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        kept = ("step", "train/loss", "train/valid_")
        return [
            {name: x for name, x in json.loads(line).items() if name.startswith(kept)}
            for line in lines
        ]

    # The loss falls, so that it never exceeds its first value.
    flags = ["--max_train_steps=20", "--valid_sets=flipped=flipped; rare:2=stopping"]
    flags += ["--save_low=rare_loss", "--max_save=9", "--early_stop=rare_loss:2:max"]
    flags += ["--valid_batch_size=10"]
    assert train(tmp_path / "whole", *flags) == 0
    assert "Early stopping at step 8" in capsys.readouterr().out
    whole = rows(tmp_path / "whole")
    assert [row["step"] for row in whole] == [0, 2, 4, 6, 8]
    for row in whole:
        flipped = row["train/valid_flipped_accuracy"]
        assert flipped == pytest.approx(1 - row["train/valid_accuracy"])
        assert ("train/valid_rare_loss" in row) == (row["step"] % 4 == 0)
    assert paths.list_steps(tmp_path / "whole" / "low_train_valid_rare_loss") == [0, 4, 8]

    # Interrupted while it validates on the second set at step 4.
    resumed = tmp_path / "resumed"
    assert train(resumed, *flags, "--module_config.stop_at_read=330") == ExitCode.STOPPED
    assert [row["step"] for row in rows(resumed)] == [0, 2]
    assert train(resumed, *flags) == 0
    assert rows(resumed) == whole
    assert paths.list_steps(resumed / "low_train_valid_rare_loss") == [0, 4, 8]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--valid_sets=a:2=x", "--save_low=a_los"], "unknown metric: valid_a_los. Available: "),
        (["--valid_sets=a:2=x", "--save_low=b_loss"], "unknown metric: valid_b_loss. Available: "),
        (["--valid_sets=a=x; a_a=x; a=y"], "--valid_sets has two sets with the name a."),
        (["--save_high=acuracy"], "--save_high names an unknown metric: valid_acuracy."),
        (["--early_stop=valid_los:2:min"], "unknown metric: valid_los. Available: valid_"),
        (["--early_stop=valid_loss"], "--early_stop must be METRIC:N"),
        (["--stop_when=valid_los<2"], "--stop_when names an unknown metric: valid_los. "),
        (["--stop_when=accuracy:0.9"], "--stop_when: A condition is a metric, >=, <=, > or <"),
        (["--early_stop=valid_accuracy:2"], "valid_accuracy:2:min or valid_accuracy:2:max"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(tmp_path, capsys, flags, message):
    assert train(tmp_path / "new" / "run", "--max_train_steps=4", *flags) == ExitCode.USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_mistake_leaves_the_earlier_run(tmp_path):
    assert train(tmp_path, "--max_train_steps=2") == 0
    assert train(tmp_path, "--max_train_steps=4", "--save_low=los") == ExitCode.USAGE
    assert paths.list_steps(tmp_path)[-1] == 2
    assert not list(tmp_path.glob("low_*"))
    assert train(tmp_path, "--max_train_steps=4", "--save_low=loss") == 0


def test_validation_data_is_required(tmp_path, capsys):
    flags = [
        f"--model_dir={tmp_path}",
        "--train_pattern=a",
        "--max_train_steps=2",
        "--save_low=loss",
    ]
    assert main.main(["train", TINY, *flags]) == ExitCode.USAGE
    assert "--save_low needs validation data: set --valid_pattern" in capsys.readouterr().err


def test_no_flag_means_no_early_stop(tmp_path):
    run = types.SimpleNamespace(config=flags_lib.parse([])[1], model_dir=tmp_path)
    assert selection.stoppings(run, None) == {}
    run = types.SimpleNamespace(config=flags_lib.parse(["--early_stop=a:b"])[1], model_dir=tmp_path)
    with pytest.raises(UsageError):
        selection.stoppings(run, None)
