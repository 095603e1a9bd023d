"""The settings of a run of `fit`, as JSON values: recorded, and compared when it resumes."""

import inspect
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from tekoa.extensions import run_record

# What a named optimizer chooses by itself: no change that the user made.
_CHOSEN = ("eta", "n_steps", "rule")


def settings_of(optimizer: Any, **arguments: Any) -> dict[str, Any]:
    """Returns the arguments that are set, and the numbers in an optimizer of optax.

    >>> import optax
    >>> settings_of(optax.sgd(0.5), batch_size=32, ema=None)
    {'batch_size': 32, 'optimizer': {'learning_rate': 0.5}}
    """
    settings = {name: _value(value) for name, value in arguments.items() if value}
    if isinstance(optimizer, str):
        return {**settings, "optimizer": optimizer}
    return {**settings, "optimizer": _numbers_of(optimizer)}


def changes(
    directory: pathlib.Path, settings: Mapping[str, Any], facts: Mapping[str, Any]
) -> list[str]:
    """Describes what has changed since the last start of a run, one setting per line.

    Args:
        directory: The directory of the run.
        settings: Those of this start.
        facts: Those of the loop, which name the rate of a named optimizer.
    """
    before = run_record.read(directory / run_record.RUN_FILE).get("settings") or {}
    if "batch_size" not in before:  # Not recorded by `fit`, or by an earlier version.
        return []
    unchanged = facts.keys() - {"optimizer"}
    old, new = (
        {name: value for name, value in record.items() if name not in unchanged}
        for record in (before, {**settings, **facts})
    )
    for record in (old, new):
        optimizer = record.get("optimizer") or {}
        record["optimizer"] = {k: v for k, v in optimizer.items() if k not in _CHOSEN}
    return run_record.changes({"settings": old}, {"settings": new})


def _value(value: Any) -> Any:
    return getattr(value, "__name__", type(value).__name__) if callable(value) else value


def _numbers_of(optimizer: Any) -> dict[str, Any]:
    """Returns the numbers that the functions of an optimizer were created with, by name."""
    numbers: dict[str, Any] = {}
    for inner, value in _closed_over(getattr(optimizer, "update", None), "", set()):
        # `optax.scale` multiplies by the negative rate.
        is_rate = inner == "step_size"
        name = "learning_rate" if is_rate else inner
        same = sum(other.split(" ")[0] == name for other in numbers)
        numbers[f"{name} {same + 1}" if same else name] = abs(value) if is_rate else value
    return numbers


def _closed_over(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _closed_over(part, name, seen)
    elif inspect.isfunction(value) and id(value) not in seen:
        seen.add(id(value))
        for inner, part in inspect.getclosurevars(value).nonlocals.items():
            yield from _closed_over(part, inner, seen)
