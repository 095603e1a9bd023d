import json
import math
import pathlib
import sys

import pytest

from tekoa._extras import MissingPackageError
from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.sweep import grid, rounds

MODEL = str(pathlib.Path(__file__).parent / "swept_model.py")
SPACE = [
    grid.parse_range("module_config.rate=1e-4..1:log"),
    grid.parse_range("module_config.width=2..9", {"module_config.width"}),
    grid.parse_range("optimizer=adam,sgd"),
]


def test_counts_are_parsed():
    assert rounds.parse_count(12) == (12, 8)
    for text in ("", "0", "a", "3:0", "1:2:3", "-4"):
        with pytest.raises(UsageError, match="--optuna must be RUNS or RUNS:AT_ONCE"):
            rounds.parse_count(text)


def test_choices_depend_on_the_results_and_the_seed_only():
    pytest.importorskip("optuna")
    first = rounds.choose(SPACE, [], n=8, seed=0, is_max=False)
    assert first == rounds.choose(SPACE, [], n=8, seed=0, is_max=False)
    assert first != rounds.choose(SPACE, [], n=8, seed=1, is_max=False)
    assert {values["optimizer"] for values in first} <= {"adam", "sgd"}
    assert all(2 <= int(values["module_config.width"]) <= 9 for values in first)


def test_later_rounds_learn_from_the_results():
    """Rates close to 0.01 are best; some runs were stopped."""
    pytest.importorskip("optuna")

    def miss(values):
        return abs(math.log10(float(values["module_config.rate"])) + 2)

    results = []
    for n in range(5):
        chosen = rounds.choose(SPACE, results, n=8, seed=n, is_max=False)
        results += [(values, miss(values) if miss(values) < 1.5 else None) for values in chosen]
    misses = [miss(values) for values, _ in results]
    assert sum(misses[-8:]) < 0.5 * sum(misses[:8])


@pytest.mark.slow
def test_the_command_trains_rounds_and_resumes_them(tmp_path, capsys):
    pytest.importorskip("optuna")
    words = ["sweep", MODEL, "--grid=module_config.rate=1e-3..1:log", "--max_train_steps=8"]
    words += ["--halving"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main.main([*words, "--optuna=6:3", f"--model_dir={whole}"]) == 0
    out = capsys.readouterr().out
    assert f"The best run is {whole}/rate=" in out
    record = json.loads((whole / "sweep.json").read_text())
    assert [len(values) for values in record["rounds"]] == [3, 3]
    assert sum(text.startswith("in the worse half") for text in record["stopped"].values()) == 4
    # The first round, then as many as before: the second round is the same.
    assert main.main([*words, "--optuna=3:3", f"--model_dir={killed}"]) == 0
    assert main.main([*words, "--optuna=6:3", f"--model_dir={killed}"]) == 0
    assert json.loads((killed / "sweep.json").read_text()) == record


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optuna=4"], "--optuna needs something to choose"),
        (["--optuna=x", "--grid=ema=0.1..0.9"], "--optuna must be RUNS"),
        (["--optuna=4", "--grid=ema=0.1..0.9:5"], "must be NAME=FIRST..LAST:log"),
        (["--grid=ema=0.1..0.9:log"], "needs a count of at least 2"),
    ],
)
def test_mistakes_are_one_line(flags, message, tmp_path, capsys):
    assert main.main(["sweep", MODEL, *flags, f"--model_dir={tmp_path}/new"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tekoa\[optuna\]'"):
        rounds.choose(SPACE, [], n=1, seed=0, is_max=False)
    flags = ["--optuna=4", "--grid=ema=0.1..0.9", f"--model_dir={tmp_path}/new"]
    assert main.main(["sweep", MODEL, *flags]) == 2
    assert not (tmp_path / "new").exists()
