"""Settings of a model changed from the command line, typed by what they replace."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from tekoa.estimator.config import UsageError


def apply_overrides(config: Any, overrides: Mapping[str, str]) -> Any:
    """Gives a config with settings replaced.

    Args:
        config: A ConfigDict, which is changed in place, or a dataclass.
        overrides: Dotted name to text.

    Raises:
        UsageError: If there is no such setting or the text is not of its type.
    """
    for name, text in overrides.items():
        config = _set(config, name.split("."), text, name)
    return config


def _set(config: Any, path: list[str], text: str, name: str) -> Any:
    known = _names(config)
    if path[0] not in known:
        close = difflib.get_close_matches(path[0], known, n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UsageError(
            f"The model has no setting {name!r}.{hint} Its settings are: {', '.join(known)}."
        )
    old = getattr(config, path[0])
    new = _set(old, path[1:], text, name) if path[1:] else parsed(text, old, name)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **{path[0]: new})
    setattr(config, path[0], new)
    return config


def _names(config: Any) -> list[str]:
    if dataclasses.is_dataclass(config):
        return [field.name for field in dataclasses.fields(config)]
    return sorted(config.keys()) if hasattr(config, "keys") else []


def parsed(text: str, old: Any, name: str) -> Any:
    """Reads a text as the type of the value it replaces.

    >>> parsed('0.5', 1.0, 'rate'), parsed('no', True, 'flag'), parsed('3,3', (1, 1), 'size')
    (0.5, False, (3, 3))
    """
    try:
        return _read(text, old)
    except ValueError:
        kind = type(old).__name__
        raise UsageError(
            f"--module_config.{name} must be of type {kind} (it is {old!r}), got {text!r}."
        ) from None


def _read(text: str, old: Any) -> Any:
    if text == "None" and not isinstance(old, str):
        return None
    if isinstance(old, bool):
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    if isinstance(old, (tuple, list)):
        kind = old[0] if old else ""
        items = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
        return type(old)(_read(item, kind) for item in items)
    if isinstance(old, (int, float)):
        return type(old)(text)
    if old is None:
        return _guessed(text)
    return text


def _guessed(text: str) -> Any:
    """A setting that is None tells nothing of its type: a number if it looks like one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
