import json
import shutil

import pytest

from tekoa.estimator.cli import flags
from tekoa.estimator.modes import watch
from tekoa.estimator.report import facts as facts_lib
from tekoa.estimator.run import run
from tekoa.hosts.signals import StopFlag
from tekoa.store.commit import lease
from tekoa.store.read import inspect


def test_gather_reads_all_facts_of_a_run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    _, config = flags.parse(
        ["--module_imp=mnist", f"--model_dir={tmp_path / 'run'}", "--save_high=acc"]
    )
    scores = {"0": 0.1, "10": 0.7, "20": 0.5, "25": 0.6}
    watch.Watcher(
        run.open_run(config), lambda path, _: {"acc": scores[path.split("_")[-1]]}, StopFlag()
    ).run(lambda *_: None)
    facts = facts_lib.gather(tmp_path / "run")
    assert (facts.end_step, facts.step, facts.is_running) == (25, 25, False)
    assert {place: [s.step for s in steps] for place, steps in facts.checkpoints.items()} == {
        "": [0, 10, 20, 25],
        "save": [20],
        "eval/high_acc": [0, 10],
    }
    assert [(b.place, b.metric, b.score, b.step) for b in facts.best] == [
        ("eval/high_acc", "acc", 0.7, 10)
    ]
    assert [p.value for p in facts.curves["eval"]["eval/acc"]] == pytest.approx(
        list(scores.values())
    )
    assert "params/Dense_1/kernel (256, 10)" in facts.curves["train"]
    assert not any(info.problem for steps in facts.checkpoints.values() for info in steps)


def test_links_out_of_a_run_are_not_followed(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    before = facts_lib.gather(tmp_path / "run")
    (tmp_path / "run" / "other").symlink_to(trained)
    (tmp_path / "run" / "high_x").symlink_to(trained / "save")
    assert facts_lib.gather(tmp_path / "run") == before


def test_empty_directory_is_empty(tmp_path):
    assert facts_lib.gather(tmp_path).is_empty
    (tmp_path / "run.json").write_text(json.dumps({"model": "m"}))
    assert not facts_lib.gather(tmp_path).is_empty


def test_running_trainer_is_recognized_by_its_lease(tmp_path):
    with lease.held(tmp_path):
        assert facts_lib.gather(tmp_path).is_running
    assert not facts_lib.gather(tmp_path).is_running


def test_steps_removed_while_reading_are_skipped(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "run")
    original = inspect.inspect

    def remove_and_inspect(path, **options):
        if path.name == "checkpoint_10":
            shutil.rmtree(path)
        return original(path, **options)

    monkeypatch.setattr(inspect, "inspect", remove_and_inspect)
    facts = facts_lib.gather(tmp_path / "run")
    assert [info.step for info in facts.checkpoints[""]] == [0, 20, 25]


def test_page_does_not_read_the_contents_of_checkpoints(trained, monkeypatch):
    """Only `tekoa inspect` verifies checksums: reading large checkpoints takes minutes."""
    modes = []
    original = inspect.inspect

    def record_mode(path, *, verify):
        modes.append(verify)
        return original(path, verify=verify)

    monkeypatch.setattr(inspect, "inspect", record_mode)
    facts_lib.gather(trained)
    assert set(modes) == {"size"}
