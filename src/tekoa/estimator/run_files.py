"""The small files of a model dir that every mode reads; no JAX is needed for them."""

import json
import pathlib
from typing import Any

RUN_FILE = "run.json"
END_FILE = "train_end.json"


def read_facts(model_dir: pathlib.Path) -> dict[str, Any]:
    """What `run.json` holds; empty if there is none."""
    return _read(model_dir / RUN_FILE)


def last_step(model_dir: pathlib.Path) -> int | None:
    """The step at which training ended, or None if it has not."""
    return _read(model_dir / END_FILE).get("step")


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
