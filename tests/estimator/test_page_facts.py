import json
import shutil

import pytest

from tekoa.estimator import page_facts, watch
from tekoa.store import inspecting
from tekoa.store import lease as leases


class NeverStop:
    def is_set(self):
        return False

    is_asked = is_set


def test_all_of_a_run_is_found(trained, tmp_path):
    from tekoa.estimator import config, run

    shutil.copytree(trained, tmp_path / "run")
    _, flags = config.parse(
        ["--module_imp=mnist", f"--model_dir={tmp_path / 'run'}", "--save_high=acc"]
    )
    scores = {"0": 0.1, "10": 0.7, "20": 0.5, "25": 0.6}
    watch.Watcher(
        run.open_run(flags), lambda path, _: {"acc": scores[path.split("_")[-1]]}, NeverStop()
    ).run(lambda *_: None)
    facts = page_facts.gather(tmp_path / "run")
    assert (facts.end_step, facts.step, facts.is_running) == (25, 25, False)
    assert {place: [s.step for s in steps] for place, steps in facts.kept.items()} == {
        "": [0, 10, 20, 25],
        "save": [20],
        "eval/high_acc": [0, 10],
    }
    assert [(b.place, b.metric, b.score, b.step) for b in facts.best] == [
        ("eval/high_acc", "acc", "0.7", 10)
    ]
    assert [p.value for p in facts.curves["eval"]["eval/acc"]] == pytest.approx(
        list(scores.values())
    )
    assert "params/Dense_1/kernel (256, 10)" in facts.curves["train"]
    assert not any(info.problem for steps in facts.kept.values() for info in steps)


def test_a_directory_without_anything_is_empty(tmp_path):
    assert page_facts.gather(tmp_path).is_empty
    (tmp_path / "run.json").write_text(json.dumps({"model": "m"}))
    assert not page_facts.gather(tmp_path).is_empty


def test_a_trainer_is_seen_by_its_lease(tmp_path):
    with leases.held(tmp_path):
        assert page_facts.gather(tmp_path).is_running
    assert not page_facts.gather(tmp_path).is_running


def test_steps_that_go_away_meanwhile_are_left_out(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "run")
    look = inspecting.inspect

    def removing(path, **options):
        if path.name == "checkpoint_10":
            shutil.rmtree(path)
        return look(path, **options)

    monkeypatch.setattr(inspecting, "inspect", removing)
    facts = page_facts.gather(tmp_path / "run")
    assert [info.step for info in facts.kept[""]] == [0, 20, 25]
