"""The bench without settings: what it stores, how it chooses AdamW's rate, what it reports."""

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("bench.untuned", reason="the benches are not part of the package")

from bench.untuned import checks, contestants, models, report, results, tasks

from tekoa import optim


def tiny_arrays():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    return (x[:48], (x[:48, 0] > 0).astype(np.int32)), (x[48:], (x[48:, 0] > 0).astype(np.int32))


TINY = tasks.Task(
    name="tiny", about="tiny", model=models.Mlp((4, 2)), load=tiny_arrays, batch_size=8, n_steps=6
)


def record(loss, accuracy=None):
    return {"loss": loss, "accuracy": accuracy}


@pytest.fixture
def store(tmp_path):
    return results.Results(tmp_path / "results.jsonl")


@pytest.mark.slow
def test_stored_results_are_not_trained_again(store, capsys):
    auto = contestants.CONTESTANTS["auto"]
    first = store.get(TINY, auto, seed=0)
    reopened = results.Results(store.path, stored_only=True)
    assert reopened.get(TINY, auto, seed=0) == first
    assert np.isfinite(first["loss"])
    assert 0 <= first["accuracy"] <= 1
    with pytest.raises(results.NotTrainedError, match="auto on tiny, seed 1"):
        reopened.get(TINY, auto, seed=1)
    longer = dataclasses.replace(TINY, n_steps=7)
    with pytest.raises(results.NotTrainedError):
        reopened.get(longer, auto, seed=0)


@pytest.mark.parametrize("name", ["amos", "amos, later form", "muon by roles", "schedule-free"])
def test_contestants_train(store, name):
    assert np.isfinite(store.get(TINY, contestants.CONTESTANTS[name], seed=0)["loss"])


def test_initial_weights_are_a_different_run(store):
    adamw = contestants.adamw_setting(1e-3, 0.0)
    usual = store.get(TINY, adamw, 0)
    scaled = store.get(TINY, adamw, 0, init_scale=10.0)
    assert scaled["loss"] != usual["loss"]
    assert len(store.path.read_text().splitlines()) == 2
    assert json.loads(store.path.read_text().splitlines()[1])["key"]["init_scale"] == 10


def test_grid_is_extended_while_the_best_is_at_the_edge(store, monkeypatch):
    trained = []

    def train(task, contestant, seed, run):
        rate, decay = contestant.numbers["rate"], contestant.numbers["decay"]
        trained.append((rate, decay, seed))
        return record(abs(np.log(rate / 0.2)) + 5 + decay)

    monkeypatch.setattr(store, "_train", train)
    best, records = results.best_adamw(store, TINY, (0, 1, 2))
    assert dict(best.numbers) == {"rate": 0.3, "decay": 0.0}
    assert [r["loss"] for r in records] == pytest.approx([abs(np.log(1.5)) + 5] * 3)
    assert {rate for rate, _, _ in trained} == {*contestants.RATES, 0.1, 0.3, 1.0}


def test_best_setting_is_chosen_by_the_mean_of_the_seeds(store, monkeypatch):
    losses = {0.01: [1.0, 9.0], 0.003: [1.2, 1.2]}

    def train(task, contestant, seed, run):
        return record(losses.get(contestant.numbers["rate"], [5.0, 5.0])[seed])

    monkeypatch.setattr(store, "_train", train)
    best, _ = results.best_adamw(store, TINY, (0, 1))
    assert best.numbers["rate"] == 0.003


@pytest.mark.slow
def test_version_changes_with_the_steps_of_the_optimizer(monkeypatch):
    behaviour = contestants.behaviour_of.__wrapped__
    before = behaviour(contestants.auto)
    assert behaviour(contestants.auto) == before
    sphere = optim.sphere.sphere
    monkeypatch.setattr(
        optim.sphere, "sphere", lambda *args, **kwargs: sphere(*args, b1=0.5, **kwargs)
    )
    assert behaviour(contestants.auto) != before


SCORES = {
    "mlp": {
        report.BEST_ADAMW: report.score([record(2.0), record(2.0)], "0.01 0"),
        "auto": report.score([record(0.9), record(1.1)]),
        "muon": report.score([record(None), record(1.0)]),
    },
    "lstm": {
        report.BEST_ADAMW: report.score([record(1.0), record(1.0)], "0.1 0.1"),
        "auto": report.score([record(2.0), record(2.0)]),
    },
}


def test_ratios_and_their_geometric_means():
    lines = report.ratio_table(SCORES).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert rows["auto"] == "| auto | 0.50 | 2.00 | 1.00 | 0.50 | 2.00 | 1.00 |"
    assert rows["muon"].startswith("| muon | failed | not run |")
    assert SCORES["mlp"]["auto"].spread == pytest.approx(0.1)


def test_profile_counts_the_tasks_within_a_factor_of_the_best():
    assert report.profile(SCORES, "auto", 1.0) == 0.5
    assert report.profile(SCORES, "auto", 2.0) == 1.0


def test_failures_name_contestant_and_task():
    assert report.failures(SCORES) == ["muon on mlp: inf, failed times"]


def test_section_of_a_page_is_replaced_and_the_rest_kept(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- auto -->\nold\n<!-- /auto -->\nafter\n")
    report.write_section(page, "auto", "new")
    assert page.read_text() == "before\n<!-- auto -->\nnew\n<!-- /auto -->\nafter\n"
    with pytest.raises(ValueError, match="has no section <!-- ratios -->"):
        report.write_section(page, "ratios", "new")


def test_best_rate_lies_between_the_rates_of_a_sweep():
    rates = (0.25, 0.5, 1.0, 2.0, 4.0)
    losses = [1 + np.log(rate / 1.3) ** 2 for rate in rates]
    assert checks.best_of_parabola(rates, losses) == pytest.approx(1.3)


def test_sweep_trains_auto_and_adamw_at_every_rate_and_seed(store, capsys):
    lines = checks.sweep(store, [checks.Size("4", TINY, 2, 1)]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| auto", "| AdamW"]
    assert len(store.lines) == 2 * len(checks.FACTORS) + len(checks.ADAMW_RATES)
