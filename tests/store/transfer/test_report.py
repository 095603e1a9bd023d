"""Reports print as an aligned table and select names by outcome."""

from tekoa.store.transfer import report


def test_rows_are_aligned_and_selected_by_outcome():
    rows = [
        report.Row(name="dense/kernel", outcome="loaded"),
        report.Row(name="b", outcome="other shape", detail="[2] -> [3]"),
    ]
    table = report.Report(rows)
    assert str(table).splitlines() == [
        "dense/kernel  loaded",
        "b             other shape  [2] -> [3]",
    ]
    assert table.names("loaded") == ["dense/kernel"]
    assert table.names("loaded", "other shape") == ["dense/kernel", "b"]


def test_empty_report_prints():
    assert str(report.Report([])) == "(no leaves)"
