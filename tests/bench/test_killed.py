"""The picture of the README: two runs are compared by all that does not depend on the clock."""

import pytest

killed = pytest.importorskip("bench.killed", reason="the benches are not part of the package")


def test_two_runs_have_equal_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(killed, "N_STEPS", 2 * killed.EVERY)
    for name in ("one", "two"):
        killed.train(str(tmp_path / name))
    one, two = (killed.rows_of(tmp_path / name) for name in ("one", "two"))
    assert killed.metrics_of(one) == killed.metrics_of(two) != []
    assert {"step", "train/loss", "eval/loss"} <= killed.metrics_of(one)[0].keys()
    assert one != two
