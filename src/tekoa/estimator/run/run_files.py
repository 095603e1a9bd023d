"""The small files of a model dir that every mode reads. Imports no JAX."""

import pathlib
from typing import Any

from tekoa.extensions import run_record
from tekoa.extensions.run_record import END_FILE as END_FILE
from tekoa.extensions.run_record import RUN_FILE as RUN_FILE

CHECK_FILE = "scales_check.txt"  # What `tekoa scales MODEL --check` printed about the run.


def read_facts(model_dir: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of `run.json`; empty if the file does not exist.

    Raises:
        errors.DamagedError: If the file is not what `tekoa train` writes.
    """
    return run_record.read(model_dir / RUN_FILE)


def last_step(model_dir: pathlib.Path) -> int | None:
    """Returns the step at which training ended, or None if it has not ended.

    Raises:
        errors.DamagedError: If the file is not what `tekoa train` writes.
    """
    return run_record.read(model_dir / END_FILE).get("step")
