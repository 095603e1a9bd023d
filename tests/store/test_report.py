"""Reports print aligned and answer by outcome."""

from tekoa.store import report


def test_rows_are_aligned_and_found_by_outcome():
    rows = [
        report.Row(name="dense/kernel", outcome="taken"),
        report.Row(name="b", outcome="other shape", detail="[2] -> [3]"),
    ]
    table = report.Report(rows)
    assert str(table).splitlines() == [
        "dense/kernel  taken",
        "b             other shape  [2] -> [3]",
    ]
    assert table.names("taken") == ["dense/kernel"]
    assert table.names("taken", "other shape") == ["dense/kernel", "b"]


def test_empty_report_prints():
    assert str(report.Report([])) == "(no leaves)"
