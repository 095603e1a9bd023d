"""The small files of a model dir that every mode reads. Imports no JAX."""

import pathlib
from typing import Any

from tekoa.core import files
from tekoa.store import errors

RUN_FILE = "run.json"
END_FILE = "train_end.json"

_MAX_BYTES = 2**26
# Fields that the commands use, and what they must be.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "random_seed": int,
    "command": list,
    "model": str,
    "settings": (dict, type(None)),
    "flags": dict,
    "versions": dict,
    "n_steps": (int, type(None)),
    "scales": dict,
    "step": int,
}


def read_facts(model_dir: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of `run.json`; empty if the file does not exist.

    Raises:
        errors.DamagedError: If the file is not what `tekoa train` writes.
    """
    return _read(model_dir / RUN_FILE)


def last_step(model_dir: pathlib.Path) -> int | None:
    """Returns the step at which training ended, or None if it has not ended.

    Raises:
        errors.DamagedError: If the file is not what `tekoa train` writes.
    """
    return _read(model_dir / END_FILE).get("step")


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        facts = files.read_json(path, max_bytes=_MAX_BYTES)
        for name in facts.keys() & _TYPES.keys():
            if not isinstance(facts[name], _TYPES[name]) or not _is_plausible(facts[name]):
                raise ValueError(f"{name!r} is {str(facts[name])[:40]!r}")
        if not all(isinstance(scale, int | float) for scale in facts.get("scales", {}).values()):
            raise ValueError("'scales' contains something else than numbers")
        return facts
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.DamagedError(
            f"{path}: is damaged: {reason}. Restore it from a backup, or remove it."
        ) from None


def _is_plausible(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) < 2**63
