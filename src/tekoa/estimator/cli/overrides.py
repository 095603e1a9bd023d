"""Overrides of model settings, parsed as the type of the value they replace."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from tekoa.core.messages import did_you_mean
from tekoa.estimator.cli.flags import UsageError

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def apply_overrides(config: Any, overrides: Mapping[str, str]) -> Any:
    """Returns a config with settings replaced.

    Args:
        config: A ConfigDict, which is changed in place, or a dataclass.
        overrides: Values as text, by dotted name.

    Raises:
        UsageError: If a setting does not exist or its text has the wrong type.
    """
    for name, text in overrides.items():
        config = _set(config, name.split("."), text, name)
    return config


def _set(config: Any, path: list[str], text: str, name: str) -> Any:
    settings = _setting_names(config)
    if path[0] not in settings:
        hint = did_you_mean(path[0], settings, n=3)
        raise UsageError(
            f"The model has no setting {name!r}.{hint} Available settings: {', '.join(settings)}."
        )
    old = getattr(config, path[0])
    if path[1:]:
        new = _set(old, path[1:], text, name)
    elif old is None and text != "None" and (kind := placeholder_type(config, path[0])):
        new = _parse_as(kind, text, name)
    else:
        new = parse_value(text, old, name)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **{path[0]: new})
    setattr(config, path[0], new)
    return config


def _setting_names(config: Any) -> list[str]:
    if dataclasses.is_dataclass(config):
        return [field.name for field in dataclasses.fields(config)]
    return sorted(config.keys()) if hasattr(config, "keys") else []


def placeholder_type(config: Any, name: str) -> type | None:
    """Returns the type of a setting that is a placeholder of ml_collections, without a value."""
    kind = config.get_type(name) if hasattr(config, "get_type") and name in config else None
    return None if kind is type(None) else kind


def _parse_as(kind: type, text: str, name: str) -> Any:
    try:
        return _parse(text, kind())
    except ValueError:
        raise UsageError(
            f"--module_config.{name} must be of type {kind.__name__}; got {text!r}."
        ) from None


def parse_value(text: str, old: Any, name: str) -> Any:
    """Parses text as the type of the value it replaces.

    >>> parse_value('0.5', 1.0, 'rate'), parse_value('no', True, 'flag')
    (0.5, False)
    >>> parse_value('3,3', (1, 1), 'size')
    (3, 3)
    """
    try:
        return _parse(text, old)
    except ValueError:
        raise UsageError(
            f"--module_config.{name} must be of type {type(old).__name__}, like its current value "
            f"{old!r}; got {text!r}."
        ) from None


def _parse(text: str, old: Any) -> Any:
    if text == "None" and not isinstance(old, str):
        return None
    if isinstance(old, bool):
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(text)
        return text.lower() in _TRUE
    if isinstance(old, (tuple, list)):
        sample = old[0] if old else ""
        items = [item.strip() for item in text.strip("()[]").split(",") if item.strip()]
        return type(old)(_parse(item, sample) for item in items)
    if isinstance(old, (int, float)):
        return type(old)(text)
    # A setting that is None has no type to follow: a number if the text is one.
    for kind in (int, float) if old is None else ():
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
