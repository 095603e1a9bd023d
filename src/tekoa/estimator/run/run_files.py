"""The small files of a model dir that every mode reads. Imports no JAX."""

import json
import pathlib
from typing import Any

RUN_FILE = "run.json"
END_FILE = "train_end.json"


def read_facts(model_dir: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of `run.json`; empty if the file does not exist."""
    return _read(model_dir / RUN_FILE)


def last_step(model_dir: pathlib.Path) -> int | None:
    """Returns the step at which training ended, or None if it has not ended."""
    return _read(model_dir / END_FILE).get("step")


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
