"""Figures of the fault tests, and the record from which the documents are generated.

A test calls `figure(measured, **promised)`. The record is `docs/reliability.json`. Promised
figures must equal the record, so that the documents state only what the tests show. Measured
figures (times, and counts that depend on them) are only recorded, by `--record-figures`.
"""

import fcntl
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RECORD = ROOT / "docs" / "reliability.json"


def read_record():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


class Figure:
    """Records or checks the figures of one test."""

    def __init__(self, node, *, is_recording):
        path = pathlib.Path(node.path).relative_to(ROOT / "tests").as_posix()
        self._name = f"{path}::{node.name}"
        self._is_recording = is_recording

    def __call__(self, measured=None, **promised):
        if self._is_recording:
            self._write({**promised, **(measured or {})})
            return
        recorded = read_record().get(self._name, {})
        differing = {
            key: (recorded.get(key), value)
            for key, value in promised.items()
            if recorded.get(key) != value
        }
        if differing:
            pytest.fail(
                f"{RECORD.name} differs from this run (recorded, now): {differing}. If the new "
                "figures are right, run this test with --record-figures and then "
                "`python tests/support/reliability.py`."
            )

    def _write(self, values):
        RECORD.touch()
        with RECORD.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            record = json.loads(file.read() or "{}")
            record[self._name] = values
            file.seek(0)
            file.truncate()
            json.dump(dict(sorted(record.items())), file, indent=1)
            file.write("\n")
