"""Optimizers by name, as a config names them: amos, lbfgs, and those of optax."""

import functools
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optax

from tekoa.core import messages, rules, trees
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.optim import groups, named
from tekoa.optim.amos import transform
from tekoa.optim.scales.table import ScaleTable

_log = logging.getLogger("tekoa")

_RANGES = {
    "learning_rate": (0, math.inf),
    "beta": (0, 1),
    "momentum": (0, 1),
    "weight_decay": (0, math.inf),
}
# Setting in the config -> parameter names in optax.
_OPTAX_NAMES = {
    "momentum": ("b1", "momentum"),
    "beta": ("b2", "decay"),
    "weight_decay": ("weight_decay",),
}


def make_optimizer(
    opt_config: Any,
    *,
    n_batches: float,
    find_scales: Callable[[], ScaleTable] | None = None,
    eta: Mapping[str, Any] | None = None,
    slot_shape: Mapping[str, Any] | None = None,
    clip_value: float | None = None,
) -> optax.GradientTransformation:
    """Creates the optimizer that a config names, and logs the settings it uses.

    Args:
        opt_config: Has `optimizer`, and optionally `learning_rate`, `momentum`, `beta` and
            `weight_decay`. None means the default of the optimizer; for Amos the default rate
            is 1 / sqrt(n_batches). `groups` sets other rates by pattern over parameter names:
            'bias$=0.01; ^embed=freeze'; these are logged.
        n_batches: Batches in the training data.
        find_scales: For Amos without `eta`: returns the table of scales, such as
            `lambda: find_scales(...)`. Called only if needed.
        eta: For Amos: manual scales, regex of the name -> number or formula of `SHAPE`.
        slot_shape: For Amos with `eta`: shapes of the slots, in the same form.
        clip_value: For Amos: limit of the absolute value of gradients.

    Raises:
        UsageError: If the optimizer is unknown, or a number is out of range.

    >>> import types
    >>> tx = make_optimizer(types.SimpleNamespace(optimizer='sgd', learning_rate=0.5), n_batches=1)
    >>> tx.update({'w': 1.0}, tx.init({'w': 1.0}))[0]
    {'w': -0.5}
    """
    settings = _settings(opt_config)
    table = parse_groups(getattr(opt_config, "groups", None))
    name = str(getattr(opt_config, "optimizer", None))
    needs_no_settings = name in named.BY_SCALES and name != "amos"
    sets_rates = any(value != "freeze" for value in table.values())
    if (name == "lbfgs" and table) or (needs_no_settings and sets_rates):
        raise UsageError(
            f"--module_config.opt_config.groups: {name} has no rates to set. Choose another "
            "optimizer, such as --module_config.opt_config.optimizer=adam."
        )
    if name == "lbfgs":
        _log.info("Optimizer lbfgs: a line search sets the step size; the rate is ignored.")
        return optax.lbfgs()
    if needs_no_settings:
        _log.info("Optimizer %s: needs no settings; those of opt_config are ignored.", name)
        own = named.NamedOptimizer(name)
        return groups.param_groups({**table, ".*": own}) if table else own
    if name == "amos":
        eta_fn, shape_fn = _scale_fns(find_scales, eta, slot_shape)
        rate = _amos_rate(settings.get("learning_rate"), n_batches)
        make = functools.partial(
            transform.amos,
            eta_fn=eta_fn,
            shape_fn=shape_fn,
            beta=settings.get("beta", 0.999),
            momentum=settings.get("momentum") or None,  # 0 needs no slot.
            clip_value=clip_value,
        )
    else:
        make, rate = from_optax(name, settings)
    if not table:
        return make(rate)  # Same state as in JEstimator, so its checkpoints can be resumed.
    return _grouped(table, make, rate)


def requested_optimizer(
    config: RunConfig, make_own: Callable[[], optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Returns the optimizer that the flags of the command request for any model file.

    Args:
        config: `optimizer` names one in place of the model's own, `learning_rate` sets its rate
            and `param_groups` other rates by pattern; 'freeze' works with the model's own too.
        make_own: Returns the model's own optimizer; called only if it is used.

    Raises:
        UsageError: If there is no such optimizer, or it has no rate that a flag could set.
    """
    name, rate = config.optimizer, config.learning_rate
    table = parse_groups(config.param_groups, "--param_groups")
    if rate == 0:
        raise UsageError("--learning_rate must be above 0, got 0.")
    _check_name(name)
    rate_flags = {
        "--learning_rate": rate is not None,
        "--param_groups": any(value != "freeze" for value in table.values()),
    }
    for flag in (flag for flag, sets_rates in rate_flags.items() if sets_rates):
        if reason := _no_rate(name):
            raise UsageError(f"{flag}: {reason}")
    if name is not None and not table:
        return named.NamedOptimizer(name, rate)
    if name is not None and name not in named.BY_SCALES:
        make, rate = from_optax(name, {} if rate is None else {"learning_rate": rate})
        return _strict(_grouped(table, make, rate))
    own = named.NamedOptimizer(name) if name is not None else make_own()
    if not table:
        return own
    return _strict(groups.param_groups({**table, ".*": own}))


def _check_name(name: str | None) -> None:
    try:
        if name is not None:
            named.check_name(name)
    except ValueError as error:
        raise UsageError(f"--optimizer: {error}") from None


def _no_rate(name: str | None) -> str | None:
    """Returns why no flag can set a rate of this optimizer, or None if one can."""
    if name is None:
        return (
            "the model sets the rates of its own optimizer. Choose one with --optimizer=NAME, or "
            "change the settings of the model."
        )
    if name == "lbfgs":
        return "a line search sets the step size of lbfgs."
    return f"{name} sets its own rates." if name in named.BY_SCALES else None


def _strict(tx: groups.GroupedOptimizer) -> groups.GroupedOptimizer:
    """Returns an optimizer that raises UsageError if a group has no parameters."""

    def init(params: Any) -> optax.OptState:
        with warnings.catch_warnings():
            warnings.simplefilter("error", groups.UnusedRuleWarning)
            try:
                return tx.init(params)
            except groups.UnusedRuleWarning as warning:
                names = messages.some_of(["/".join(n) for n in trees.leaf_names(params)], limit=12)
                raise UsageError(
                    f"--param_groups: {warning} The parameters are: {names}."
                ) from None

    return tx.with_init(init)


def _grouped(
    table: Mapping[str, Any], make: Callable[..., Any], rate: float | None
) -> groups.GroupedOptimizer:
    """Returns the optimizer with other rates by pattern; `rate` None is its own default."""
    text = "its default" if rate is None else f"{rate:.4g}"
    _log.info("Rates by group: %s, and %s for the rest.", table, text)
    # None in a table would freeze the rest.
    rest = make(None) if rate is None else rate
    return groups.param_groups({**table, ".*": rest}, make=make)


def parse_steps(flag: str, text: str | None) -> dict[str, int] | None:
    """Parses numbers of steps by pattern; None if `flag` is not set.

    Raises:
        UsageError: If an entry is not `PATTERN=STEPS`.

    >>> parse_steps('--unfreeze_at', '^embed=500; bias$=100')
    {'^embed': 500, 'bias$': 100}
    """

    def steps(word: str) -> int | None:
        return n if (n := int(word)) > 0 else None

    return _parse_table(flag, text, steps, "STEPS", "a number of steps from 1 up") or None


def parse_groups(
    text: str | None, flag: str = "--module_config.opt_config.groups"
) -> dict[str, Any]:
    """Parses rates by pattern; `flag` is named in errors.

    Raises:
        UsageError: If an entry is not `PATTERN=RATE` or `PATTERN=freeze`.

    >>> parse_groups('bias$=0.01; ^embed=freeze')
    {'bias$': 0.01, '^embed': 'freeze'}
    """

    def rate(word: str) -> float | str | None:
        if word == "freeze":
            return word
        return x if 0 < (x := float(word)) < math.inf else None

    return _parse_table(flag, text, rate, "RATE", "is above 0 or 'freeze'")


def _parse_table(
    flag: str, text: str | None, read: Callable[[str], Any], what: str, allowed: str
) -> dict[str, Any]:
    """Parses 'PATTERN=VALUE; ...'; `read` returns None, or raises ValueError, for a wrong value."""
    table: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(";"))):
        pattern, _, word = (piece.strip() for piece in part.rpartition("="))
        try:
            rules.compile_rules({pattern: word})
            table[pattern] = read(word)
        except ValueError:
            table[pattern] = None
        if not pattern or table[pattern] is None:
            raise UsageError(
                f"{flag} must be 'PATTERN={what}; ...', where PATTERN is a regular expression and "
                f"{what} {allowed}; got {part!r}."
            )
    return table


def _settings(opt_config: Any) -> dict[str, float]:
    """Returns the numbers that the config sets, after checking their ranges."""
    settings = {}
    for name, (low, high) in _RANGES.items():
        value = getattr(opt_config, name, None)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value < high or (name == "learning_rate" and not value):
            edge = "above 0" if name == "learning_rate" else f"in [{low}, {high})"
            raise UsageError(f"--module_config.opt_config.{name} must be {edge}, got {value!r}.")
        settings[name] = value
    return settings


def _scale_fns(
    find_scales: Callable[[], ScaleTable] | None,
    eta: Mapping[str, Any] | None,
    slot_shape: Mapping[str, Any] | None,
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Returns `eta_fn` and `shape_fn` for Amos."""
    by_rules = functools.partial(rules.params_fn_from_assign_map, eval_str_value=True)
    if eta is not None:
        return by_rules(eta), None if slot_shape is None else by_rules(slot_shape)
    if find_scales is None:
        raise UsageError(
            "Amos needs scales, but this model file passes neither eta= nor find_scales= to "
            "make_optimizer. Pass one of them, or choose another optimizer."
        )
    table = find_scales()
    _log.info("Amos scales found for the model:\n%s", table)
    return table.eta_fn, table.shape_fn


def _amos_rate(rate: float | None, n_batches: float) -> float:
    """Returns the requested rate, or the default if it is None; logs both."""
    if not n_batches > 0:
        raise UsageError(f"Amos needs the number of batches in the data, got {n_batches!r}.")
    default_rate = 1 / math.sqrt(n_batches)
    rate = default_rate if rate is None else rate
    message = "Optimizer amos: learning rate %.4g; 1/sqrt(%.4g batches) is %.4g."
    _log.info(message, rate, n_batches, default_rate)
    if rate < default_rate / 10:
        _log.warning(
            "The learning rate %.4g is small for Amos. Set --module_config.opt_config."
            "learning_rate=None to use the default, 1/sqrt(number of batches) = %.4g.",
            rate,
            default_rate,
        )
    return rate


def from_optax(name: str, settings: Mapping[str, float]) -> tuple[Callable[..., Any], float]:
    """Returns the function that creates an optimizer of optax for a rate, and the rate."""
    try:
        named.check_name(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    make = named.makers()[name]
    parameters = inspect.signature(make).parameters
    arguments: dict[str, Any] = {}
    for setting, aliases in _OPTAX_NAMES.items():
        parameter = next((alias for alias in aliases if alias in parameters), None)
        if parameter is not None and setting in settings:
            arguments[parameter] = settings[setting]
    if not arguments.get("momentum"):
        arguments.pop("momentum", None)  # 0 needs no slot.
    default_rate = named.default_rate(name)
    if default_rate is None:
        default_rate = parameters["learning_rate"].default
    rate = settings.get("learning_rate", default_rate)
    _log.info("Optimizer %s: %s.", name, {"learning_rate": rate, **arguments})
    return lambda learning_rate: make(learning_rate=learning_rate, **arguments), rate
