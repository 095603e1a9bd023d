"""The grid of a sweep: which numbers are swept, and the runs that result. Imports no JAX."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tekoa.core.messages import did_you_mean
from tekoa.estimator.cli import flags
from tekoa.estimator.cli.flags import RunConfig, UsageError

_PREFIX = "module_config."
_SYNTAX = "NAME=FIRST..LAST:log:COUNT, NAME=FIRST..LAST:COUNT or NAME=VALUE,VALUE,..."
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

    @property
    def short_name(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


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
        given = base.given | changes.keys()
        return dataclasses.replace(base, **changes, overrides=overrides, given=given)


def parse_axis(text: str) -> Axis:
    """Parses one entry of the grid.

    Raises:
        UsageError: If the text has another form, or names something that cannot be swept.

    >>> parse_axis('module_config.rate=1e-4..1e-1:log:4').values
    ('0.0001', '0.001', '0.01', '0.1')
    >>> parse_axis('ema=0.9,0.99')
    Axis(name='ema', values=('0.9', '0.99'))
    """
    name, equals, values = text.strip().removeprefix("--").partition("=")
    if not equals or not name or not values:
        raise UsageError(f"--grid={text!r} must be {_SYNTAX}.")
    if not name.startswith(_PREFIX):
        _check_flag(name)
    if ".." not in values:
        listed = tuple(value.strip() for value in values.split(",") if value.strip())
        return Axis(name=name, values=listed)
    limits, *options = values.split(":")
    first, _, last = limits.partition("..")
    try:
        low, high, n = float(first), float(last), int(options[-1])
        if options[:-1] not in ([], ["log"], ["lin"]):
            raise ValueError(options)
    except (ValueError, IndexError):
        raise UsageError(f"--grid={text!r} must be {_SYNTAX}.") from None
    is_log = options[:-1] == ["log"]
    if (
        n < 2
        or not (math.isfinite(low) and math.isfinite(high))
        or (is_log and min(low, high) <= 0)
    ):
        raise UsageError(
            f"--grid={text!r}: a range needs two finite limits (above 0 for log) and a count of at "
            "least 2."
        )
    return Axis(name=name, values=tuple(_text(x) for x in _spread(low, high, n, is_log)))


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
    short = [axis.short_name for axis in axes]
    names = short if len(set(short)) == len(short) else [axis.name for axis in axes]
    lanes = []
    for values in itertools.product(*(axis.values for axis in axes)):
        for seed in seeds:
            words = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
            if len(seeds) > 1 or not words:
                words.append(f"seed={seed}")
            chosen = {axis.name: value for axis, value in zip(axes, values, strict=True)}
            name = ",".join(words).replace("/", "_")
            lanes.append(Lane(name=name, values=chosen, seed=seed))
    return lanes
