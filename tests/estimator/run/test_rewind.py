"""Rewinding a run: the older step is continued exactly, and the newer ones are kept."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from support import events
from tekoa import store
from tekoa.estimator.cli import main
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.run import rewind
from tekoa.store.commit import paths
from tekoa.testing import assert_trees_equal

# Its dropout and shuffled data show whether the random key and the data position are restored.
TINY = str(pathlib.Path(__file__).parents[2] / "support" / "tiny_model.py")


def train(run, n_steps, *flags):
    return main.main(["train", TINY, f"--model_dir={run}", f"--max_train_steps={n_steps}", *flags])


def rewind_to(path):
    return f"--checkpoint_path={path}", "--train_load_step"


@pytest.fixture(scope="module")
def fifteen_steps(tmp_path_factory):
    run = tmp_path_factory.mktemp("rewind") / "run"
    assert train(run, 15, "--save_every_steps=5") == 0
    return run


@pytest.fixture
def run(fifteen_steps, tmp_path):
    """A run with checkpoints 0, 5, 10, 15 and permanent copies of 5, 10, 15."""
    shutil.copytree(fifteen_steps, tmp_path / "run")
    return tmp_path / "run"


def digest(directory, step):
    return store.commit_id(paths.step_dir(directory, step)).digest


def parent(directory, step):
    return store.commit_id(paths.step_dir(directory, step)).parent


def contents(directory, step):
    return {**store.load(directory, step=step), "meta": None}


def test_a_rewound_run_repeats_the_steps_that_are_set_aside(run, fifteen_steps, capsys):
    flags = ("--save_every_steps=5", *rewind_to(run / "checkpoint_5"))
    assert train(run, 15, *flags) == 0
    line = f"steps 10, 15 are set aside in {run / 'set_aside-15'}.\n"
    assert f"Rewinding to {run / 'checkpoint_5'}: {line}" in capsys.readouterr().out
    assert paths.list_steps(run) == [0, 5, 10, 15]
    assert paths.list_steps(run / "save") == [5, 10, 15]
    for directory in ("", "save"):
        aside = run / directory / "set_aside-15"
        assert paths.list_steps(aside) == [10, 15]
        for step in (10, 15):
            assert digest(aside, step) == digest(fifteen_steps / directory, step)
            assert digest(aside, step) != digest(run / directory, step)
    # The same data, dropout and optimizer state lead to the same values.
    assert_trees_equal(contents(run, 15), contents(fifteen_steps, 15))
    assert parent(run, 10) == digest(run, 5)


def test_the_same_command_resumes_the_rewound_run(run, capsys):
    flags = rewind_to(run / "checkpoint_5")
    assert train(run, 10, *flags) == 0
    rewound = digest(run, 10)
    capsys.readouterr()
    assert train(run, 15, *flags) == 0
    assert "already rewound" in capsys.readouterr().out
    assert (digest(run, 10), parent(run, 15)) == (rewound, rewound)
    assert len(list(run.glob("set_aside-*"))) == 1
    # Without the record, it is rewound again.
    (run / rewind.REWIND_FILE).unlink()
    assert train(run, 10, *flags) == 0
    assert digest(run / "set_aside-15-2", 10) == rewound


def test_another_command_rewinds_again(run):
    assert train(run, 10, *rewind_to(run / "checkpoint_5")) == 0
    assert train(run, 5, *rewind_to(run / "checkpoint_0")) == 0
    assert paths.list_steps(run) == [0, 5]
    assert [paths.list_steps(run / f"set_aside-{n}") for n in (15, 10)] == [[10, 15], [5, 10]]


def test_a_rewinding_that_was_killed_is_completed(run):
    (run / "set_aside-15").mkdir()
    (run / "checkpoint_10").rename(run / "set_aside-15" / "checkpoint_10")
    assert train(run, 10, *rewind_to(run / "checkpoint_5")) == 0
    assert paths.list_steps(run) == [0, 5, 10]
    assert paths.list_steps(run / "set_aside-15") == [10, 15]
    assert parent(run, 10) == digest(run, 5)


def test_a_run_is_rewound_to_a_best_checkpoint(run):
    best = run / "eval" / "high_accuracy"
    shutil.copytree(run / "checkpoint_5", best / "checkpoint_5")
    shutil.rmtree(run / "checkpoint_5")
    assert train(run, 15, *rewind_to(best)) == 0
    assert paths.list_steps(run) == [0, 5, 10, 15]
    assert parent(run, 10) == digest(best, 5)
    # A better one that the rewound run has written does not rewind it again.
    shutil.copytree(run / "checkpoint_10", best / "checkpoint_10")
    assert train(run, 20, *rewind_to(best)) == 0
    assert parent(run, 20) == digest(run, 15)


SELECTION = ("--valid_pattern=valid", "--save_high=accuracy", "--early_stop=cost:50:min")


def validations(run):
    return json.loads((run / "early_stop.json").read_text())


def losses(run):
    """Returns the losses that are stored with the checkpoints of a run."""
    steps = [step for step in paths.list_steps(run) if step > 0]
    metrics = {info.step: info.metrics for info in store.inspect(run)}
    return {step: np.float32(metrics[step]["train/loss"]) for step in steps}


def metrics(run):
    """Returns the lines of metrics.jsonl by step; each step must be there once."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    return dict(zip(steps, rows, strict=True))


def test_a_run_that_resumes_from_an_older_step_replaces_its_points(run):
    before = losses(run)
    for step in (10, 15):  # As if they had been lost.
        shutil.rmtree(paths.step_dir(run, step))
    # They are discarded at the start, before there are new ones.
    assert train(run, 5) == 0
    assert [step for step, _ in events.read_points(run / "train")["train/loss"]] == [5]
    assert list(metrics(run)) == [0, 5]
    assert train(run, 20, "--module_config.rate=0.1", "--check_every_steps=4") == 0
    points = events.read_points(run / "train")["train/loss"]
    assert [step for step, _ in points] == [5, 8, 12, 16, 20]
    assert dict(points) == losses(run)
    assert {n: np.float32(x["train/loss"]) for n, x in metrics(run).items() if n} == losses(run)
    assert losses(run)[5] == before[5]


@pytest.mark.slow
def test_nothing_of_the_steps_set_aside_counts_for_the_new_history(tmp_path):
    run = tmp_path / "run"
    watch = ["eval_wait", TINY, f"--model_dir={run}", "--eval_pattern=eval", "--save_high=accuracy"]
    assert train(run, 15, *SELECTION) == 0
    assert main.main(watch) == 0
    # The later steps were the best; now they are worse, because nothing is learned.
    best_dirs = [run / "high_train_valid_accuracy", run / "eval" / "high_accuracy"]
    for best_dir in best_dirs:
        for step in (10, 15):
            shutil.rmtree(best_dir / f"checkpoint_{step}", ignore_errors=True)
            shutil.copytree(run / f"checkpoint_{step}", best_dir / f"checkpoint_{step}")
        (best_dir / "score").write_text("1.0")
    (run / "eval" / "high_accuracy" / "scores.json").write_text(
        json.dumps([{"step": 15, "commit": digest(run, 15), "value": 1.0}])
    )
    before = events.read_points(run / "train")["train/loss"]
    assert [step for step, _ in before] == [5, 10, 15]
    still = "--module_config.rate=0"
    assert train(run, 5, *SELECTION, *rewind_to(run / "checkpoint_5")) == 0
    assert [step for step, _ in events.read_points(run / "train")["train/loss"]] == [5]
    for best_dir in best_dirs:
        assert paths.list_steps(best_dir / "set_aside-15") == [10, 15]
        assert all(step <= 5 for step in paths.list_steps(best_dir))
        assert not (best_dir / "score").exists() or paths.list_steps(best_dir)
    assert train(run, 15, *SELECTION, still, *rewind_to(run / "checkpoint_5")) == 0
    assert main.main(watch) == 0
    after = dict(events.read_points(run / "train")["train/loss"])
    assert after == losses(run)
    assert after[5] == dict(before)[5]
    assert all(after[step] != dict(before)[step] for step in (10, 15))
    # Nothing was learned after step 5, so all validations have its value.
    values = validations(run)
    assert values["15"] == values["10"] == values["5"]
    for best_dir in best_dirs:
        for step in paths.list_steps(best_dir):
            assert_trees_equal(contents(best_dir, step), contents(run, step))
    assert float((best_dirs[1] / "score").read_text()) < 1.0


def test_a_step_of_another_history_is_set_aside_too(run, fifteen_steps):
    assert train(run, 10, *rewind_to(run / "checkpoint_5")) == 0
    replaced = digest(run, 10)
    assert train(run, 15, *rewind_to(run / "set_aside-15" / "checkpoint_10")) == 0
    assert digest(run / "set_aside-10", 10) == replaced
    assert parent(run, 15) == digest(fifteen_steps, 10)


def test_a_checkpoint_that_does_not_fit_leaves_the_run_unchanged(run, capsys):
    manifest = paths.step_dir(run, 5) / paths.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert train(run, 20, *rewind_to(run / "checkpoint_5")) == ExitCode.DAMAGED
    assert "checkpoint_5" in capsys.readouterr().err
    assert paths.list_steps(run) == [0, 5, 10, 15]
    assert not (run / rewind.REWIND_FILE).exists()


def test_a_dry_run_sets_nothing_aside(run):
    before = sorted(run.iterdir())
    assert train(run, 15, "--dry_run", *rewind_to(run / "checkpoint_5")) == 0
    assert sorted(run.iterdir()) == before


def test_the_flag_that_rewinds_is_named(run, capsys):
    assert train(run, 15, f"--checkpoint_path={run / 'checkpoint_5'}") == 0
    assert "or set --train_load_step to rewind the run to it.\n" in capsys.readouterr().out
    assert paths.list_steps(run) == [0, 5, 10, 15]
