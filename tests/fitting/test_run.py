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


def fit(**options):
    settings = {"loss": "cross_entropy", "optimizer": optax.adam(0.05), "epochs": 8}
    settings |= {"batch_size": 16, "show_progress": False, **options}
    return tekoa.fit(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), (X, Y), **settings)


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

    def without_timings(rows):
        names = [name for name in rows[0] if "seconds" not in name and "system" not in name]
        return [{name: row[name] for name in names} for row in rows]

    rows, expected = map(without_timings, (resumed.history.rows, whole.history.rows))
    by_step = {row["step"]: row for row in rows}
    assert len(by_step) == len(rows)
    assert all(by_step[row["step"]] == row for row in expected)


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
