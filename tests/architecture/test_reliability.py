"""The table of `docs/reliability.md` says what the tests showed, and nothing else."""

import pathlib
import re

from support import figures, reliability

TESTS = pathlib.Path(__file__).parents[1]


def test_the_page_has_the_table_that_the_record_gives():
    _, table, _ = reliability.split(reliability.PAGE.read_text())
    assert table == reliability.render(), "Run `python tests/support/reliability.py`."


def test_every_row_names_tests_that_exist():
    for row in reliability.CASES:
        for test in row.tests:
            path, _, name = test.partition("::")
            text = (TESTS / path).read_text()
            assert f"def {name.partition('[')[0]}(" in text or not name, test


def test_every_record_belongs_to_a_test_that_records():
    for test in figures.read_record():
        path, _, name = test.partition("::")
        body = (TESTS / path).read_text().partition(f"def {name.partition('[')[0]}(")[2]
        assert re.match(r"[^:]*\bfigure\b", body), test
