"""Starts, stops and files of `fit`."""

import json
import os
import signal

import numpy as np
import optax
import pytest
from flax import nnx

import tekoa
from tekoa.store.commit import paths
from tekoa.store.errors import StoreError
from tekoa.testing import assert_trees_equal

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 4)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
TEST = X[:30] + 0.1, Y[:30]


def fit(data=(X, Y), **options):
    settings = {"loss": "cross_entropy", "optimizer": optax.adam(0.05), "epochs": 8}
    settings |= {"batch_size": 16, "show_progress": False, **options}
    return tekoa.fit(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), data, **settings)


def test_a_stopped_run_resumes_to_the_same_bits(tmp_path, capsys):
    def interrupt(checkpoint):
        if checkpoint.step == 18:
            os.kill(os.getpid(), signal.SIGTERM)
        return checkpoint

    options = {"validation": TEST, "metrics": "accuracy"}
    whole = fit(directory=tmp_path / "whole", **options)
    stopped = fit(directory=tmp_path / "run", callbacks=[interrupt], **options)
    assert not stopped.is_complete
    assert stopped.step < 48
    assert "Stopped at step" in capsys.readouterr().out
    resumed = fit(directory=tmp_path / "run", **options)
    assert resumed.is_complete
    assert_trees_equal(resumed.state, whole.state)

    rows, expected = map(without_timings, (resumed.history.rows, whole.history.rows))
    by_step = {row["step"]: row for row in rows}
    assert len(by_step) == len(rows)
    assert all(by_step[row["step"]] == row for row in expected)


def test_a_complete_run_sends_what_its_tracker_lacks(tmp_path):
    fit(directory=tmp_path)
    result = fit(directory=tmp_path, track="csv")
    n_lines = len((tmp_path / "metrics.csv").read_text().splitlines())
    assert n_lines == 1 + len(result.history.rows)


class Signalling(list):
    """Batches, of which reading the n-th sends SIGTERM."""

    def __init__(self, batches, n):
        super().__init__(batches)
        self.n = n

    def __getitem__(self, i):
        self.n -= 1
        if self.n == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(i)


BATCHES = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 96, 16)]


def without_timings(rows):
    names = [name for name in rows[0] if "seconds" not in name and "system" not in name]
    return [{name: row.get(name) for name in names} for row in rows]


def test_a_stop_between_two_checks_saves_its_step_without_a_validation(tmp_path):
    options = {"epochs": None, "steps": 24, "steps_per_check": 6, "validation": TEST}
    stopped = fit(Signalling(BATCHES * 4, 16), directory=tmp_path / "run", **options)
    assert not stopped.is_complete
    assert 12 < stopped.step < 18
    assert paths.list_steps(tmp_path / "run") == [stopped.step]
    assert "eval/loss" not in stopped.history.rows[-1]
    resumed = fit(BATCHES * 4, directory=tmp_path / "run", **options)
    whole = fit(BATCHES * 4, directory=tmp_path / "whole", **options)
    assert_trees_equal(resumed.state, whole.state)
    rows = [row for row in resumed.history.rows if row["step"] != stopped.step]
    assert without_timings(rows) == without_timings(whole.history.rows)


@pytest.mark.parametrize("at", [12, 24])
def test_an_interrupted_validation_is_repeated_by_the_next_start(tmp_path, at):
    options = {"epochs": None, "steps": 24, "steps_per_check": 6, "patience": 9}
    validation = Signalling(BATCHES[:3], 3 * at // 6 - 1)
    stopped = fit(BATCHES * 4, validation=validation, directory=tmp_path / "run", **options)
    assert not stopped.is_complete
    assert stopped.step == at
    assert paths.list_steps(tmp_path / "run") == [at]
    options["validation"] = BATCHES[:3]
    resumed = fit(BATCHES * 4, directory=tmp_path / "run", **options)
    whole = fit(BATCHES * 4, directory=tmp_path / "whole", **options)
    assert resumed.is_complete
    assert_trees_equal(resumed.state, whole.state)
    assert without_timings(resumed.history.rows) == without_timings(whole.history.rows)
    stored = [(path / "early_stop.json").read_text() for path in tmp_path.iterdir()]
    assert stored[0] == stored[1]
    best = [tekoa.store.inspect(tmp_path / name / "low_eval_loss") for name in ("run", "whole")]
    assert [info.step for info in best[0]] == [info.step for info in best[1]]


def test_the_end_is_marked_only_while_all_steps_are_complete(tmp_path):
    mark, seen = tmp_path / "run" / "train_end.json", []

    def interrupt(checkpoint):
        seen.append(mark.exists())
        os.kill(os.getpid(), signal.SIGTERM)
        return checkpoint

    assert fit(directory=tmp_path / "run", epochs=1).is_complete
    assert mark.exists()
    assert not fit(directory=tmp_path / "run", epochs=8, callbacks=[interrupt]).is_complete
    assert seen
    assert not any(seen)
    assert not mark.exists()


def test_lines_of_steps_that_were_never_committed_are_dropped(tmp_path):
    first = fit(directory=tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 54, "train/loss": 0.1}\n')
    assert fit(directory=tmp_path / "run").history.rows == first.history.rows


def test_a_finished_run_is_not_trained_again(tmp_path, capsys):
    first = fit(directory=tmp_path / "run")
    again = fit(directory=tmp_path / "run", show_progress=True)
    assert "Nothing to do: all 48 steps are complete." in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "train_end.json").read_text()) == {"step": 48}
    assert again.history.rows == first.history.rows
    assert_trees_equal(again.state.params, first.state.params)


@pytest.mark.parametrize("suffix", ["", f".bad-{32 * '0'}"], ids=["damaged", "quarantined"])
def test_a_directory_whose_only_step_is_damaged_is_not_trained_from_scratch(tmp_path, suffix):
    fit(epochs=1, directory=tmp_path)
    (path,) = tmp_path.glob("checkpoint_*")
    (path / paths.MANIFEST).write_text("{")
    path.rename(f"{path}{suffix}")
    with pytest.raises(StoreError, match="none is usable"):
        fit(epochs=2, directory=tmp_path)


def test_files_of_a_run(tmp_path):
    fit(directory=tmp_path / "run", validation=TEST)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"checkpoint_48", "metrics.jsonl", "train", "low_eval_loss"} <= names
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6, 49, 6))


def test_stages_run_in_order_and_every_one_sees_the_validation(tmp_path, capsys):
    seen = []

    def note(checkpoint):
        written = (tmp_path / f"checkpoint_{checkpoint.step}").exists()
        seen.append((checkpoint.step, "loss" in checkpoint.metrics["eval"], written))
        return checkpoint

    fit(validation=TEST, callbacks=[note], epochs=2, directory=tmp_path, show_progress=True)
    assert seen == [(6, True, False), (12, True, False)]
    assert "eval loss" in capsys.readouterr().err


def test_a_finished_run_plans_no_optimizer(tmp_path, capsys):
    for _ in range(2):
        fit(directory=tmp_path, optimizer="auto", epochs=1, show_progress=True)
    printed = capsys.readouterr().out
    assert printed.count("planned for") == 1
    assert "Nothing to do" in printed
