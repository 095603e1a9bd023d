"""The grid of a sweep: which numbers are swept, and the runs that result. Imports no JAX."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Container, Mapping, Sequence
from typing import Any

from tekoa.core.messages import did_you_mean
from tekoa.estimator.cli import flags
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.estimator.cli.overrides import placeholder_type
from tekoa.estimator.cli.run_config import FIELDS

_PREFIX = "module_config."
_SYNTAX = "NAME=FIRST..LAST:log:COUNT, NAME=FIRST..LAST:COUNT or NAME=VALUE,VALUE,..."
_RANGE_SYNTAX = "NAME=FIRST..LAST:log, NAME=FIRST..LAST or NAME=VALUE,VALUE,..."
# Flags of a sweep as a whole.
_NOT_SWEPT = ("model_dir", "module_imp", "mode", "again", "random_seed", "dry_run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One swept number.

    Attributes:
        name: A flag, or "module_config." and the name of a setting of the model.
        values: Its values, as text.
    """

    name: str
    values: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lane:
    """One run of a sweep.

    Attributes:
        name: The name of its directory.
        values: The value of each axis, by the name of the axis.
        seed: Its seed.
    """

    name: str
    values: Mapping[str, str]
    seed: int

    def config(self, base: RunConfig, directory: pathlib.Path) -> RunConfig:
        """Returns the flags of the run.

        Raises:
            UsageError: If a value does not fit the flag.
        """
        overrides = dict(base.overrides)
        changes: dict[str, Any] = {
            "model_dir": str(directory / self.name),
            "random_seed": self.seed,
            "progress": False,
            # So that the lane computes the same bits when it is resumed by itself.
            "steps_per_dispatch": "1",
        }
        for name, text in self.values.items():
            if name.startswith(_PREFIX):
                overrides[name.removeprefix(_PREFIX)] = text
            else:
                changes[name] = getattr(flags.parse([f"--{name}={text}"])[1], name)
        set_flags = base.set_flags | changes.keys()
        return dataclasses.replace(base, **changes, overrides=overrides, set_flags=set_flags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """A number to choose from a range.

    Attributes:
        name: As for `Axis`.
        low: The lower limit.
        high: The upper limit.
        is_log: Whether its logarithm is evenly distributed.
        is_int: Whether it is an integer.
    """

    name: str
    low: float
    high: float
    is_log: bool
    is_int: bool


def parse_axis(text: str, integers: Container[str] = ()) -> Axis:
    """Parses one entry of the grid.

    Args:
        text: The entry.
        integers: Names of settings and flags that are integers.

    Raises:
        UsageError: If the text has another form, or names something that cannot be swept.

    >>> parse_axis('module_config.rate=1e-4..1e-1:log:4').values
    ('0.0001', '0.001', '0.01', '0.1')
    >>> parse_axis('ema=0.9,0.99')
    Axis(name='ema', values=('0.9', '0.99'))
    """
    name, values = _split(text, _SYNTAX)
    if ".." not in values:
        return _listed(name, values)
    limits, _, count = values.rpartition(":")
    if not count.isdigit() or int(count) < 2:
        raise UsageError(f"--grid={text!r} needs a count of at least 2: {_SYNTAX}.")
    limited = _range(text, name, limits, _SYNTAX, integers)
    spread = _spread(limited.low, limited.high, int(count), limited.is_log)
    rounded = map(round, spread) if limited.is_int else spread
    return Axis(name=name, values=tuple(dict.fromkeys(map(_text, rounded))))


def parse_range(text: str, integers: Container[str] = ()) -> Range | Axis:
    """Parses one entry of a grid from which values are chosen: a range, or a list.

    Args:
        text: The entry.
        integers: Names of settings and flags that are integers.

    Raises:
        UsageError: If the text has another form, or names something that cannot be swept.

    >>> parse_range('ema=0.5..0.9')
    Range(name='ema', low=0.5, high=0.9, is_log=False, is_int=False)
    """
    name, values = _split(text, _RANGE_SYNTAX)
    if ".." not in values:
        return _listed(name, values)
    return _range(text, name, values, _RANGE_SYNTAX, integers)


def _split(text: str, syntax: str) -> tuple[str, str]:
    name, _, values = text.strip().removeprefix("--").partition("=")
    if not name or not values:
        raise UsageError(f"--grid={text!r} must be {syntax}.")
    if not name.startswith(_PREFIX):
        _check_flag(name)
    return name, values


def _listed(name: str, values: str) -> Axis:
    return Axis(name=name, values=tuple(v.strip() for v in values.split(",") if v.strip()))


def _range(text: str, name: str, values: str, syntax: str, integers: Container[str]) -> Range:
    limits, _, scale = values.partition(":")
    first, _, last = limits.partition("..")
    try:
        low, high = sorted([float(first), float(last)])
        if scale not in ("", "log", "lin"):
            raise ValueError(scale)
    except ValueError:
        raise UsageError(f"--grid={text!r} must be {syntax}.") from None
    if not math.isfinite(low) or not math.isfinite(high) or (scale == "log" and low <= 0):
        raise UsageError(f"--grid={text!r} needs two finite limits, above 0 for log.")
    return Range(name=name, low=low, high=high, is_log=scale == "log", is_int=name in integers)


def integers(texts: Sequence[str], settings: Any) -> set[str]:
    """Returns the names in a grid whose values are integers.

    Args:
        texts: The entries of the grid.
        settings: The settings of the model.
    """
    names = {text.strip().removeprefix("--").partition("=")[0] for text in texts}
    flag_names = {name for name, field in FIELDS.items() if field.type in (int, int | None)}
    return (names & flag_names) | {
        name
        for name in names
        if name.startswith(_PREFIX) and _is_int(settings, name.removeprefix(_PREFIX).split("."))
    }


def _is_int(settings: Any, path: Sequence[str]) -> bool:
    *outer, name = path
    for part in outer:
        settings = getattr(settings, part, None)
    value = getattr(settings, name, None)
    if value is None:
        return placeholder_type(settings, name) is int
    return isinstance(value, int) and not isinstance(value, bool)


def _check_flag(name: str) -> None:
    if name in flags.FLAG_NAMES and name not in _NOT_SWEPT:
        return
    if name in ("random_seed", "seed"):
        raise UsageError("Seeds are not part of the grid: set --seeds=COUNT.")
    hint = did_you_mean(name, flags.FLAG_NAMES, n=3)
    raise UsageError(
        f"--grid cannot sweep {name!r}.{hint} Name a flag, or a setting of the model as "
        "module_config.NAME."
    )


def _spread(low: float, high: float, n: int, is_log: bool) -> list[float]:
    if is_log:
        return [math.exp(x) for x in _spread(math.log(low), math.log(high), n, False)]
    return [low + (high - low) * i / (n - 1) for i in range(n)]


def _text(value: float) -> str:
    """Returns a number with six digits, without a point if it is an integer."""
    return f"{round(value)}" if math.isclose(value, round(value)) else f"{value:.6g}"


def lanes_of(axes: Sequence[Axis], seeds: Sequence[int]) -> list[Lane]:
    """Returns one lane for each combination of values and seeds.

    Raises:
        UsageError: If an axis is named twice, or a value is.

    >>> axes = [parse_axis('module_config.rate=0.1,0.2')]
    >>> [lane.name for lane in lanes_of(axes, [3, 4])]
    ['rate=0.1,seed=3', 'rate=0.1,seed=4', 'rate=0.2,seed=3', 'rate=0.2,seed=4']
    """
    for words in ([axis.name for axis in axes], *(axis.values for axis in axes)):
        if len(set(words)) < len(words):
            raise UsageError(f"--grid: {', '.join(words)} has the same entry twice.")
    return [
        lane_of(dict(zip([axis.name for axis in axes], values, strict=True)), seed, len(seeds))
        for values in itertools.product(*(axis.values for axis in axes))
        for seed in seeds
    ]


def lane_of(values: Mapping[str, str], seed: int, n_seeds: int = 1) -> Lane:
    """Returns the lane of some values; its name contains the seed if there are several.

    >>> lane_of({'module_config.rate': '0.1', 'ema': '0.9'}, 0).name
    'rate=0.1,ema=0.9'
    """
    short = [name.rpartition(".")[2] for name in values]
    names = short if len(set(short)) == len(short) else list(values)
    words = [f"{name}={value}" for name, value in zip(names, values.values(), strict=True)]
    if n_seeds > 1 or not words:
        words.append(f"seed={seed}")
    return Lane(name=",".join(words).replace("/", "_"), values=values, seed=seed)
