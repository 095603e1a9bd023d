"""Optimizers by the names that a config gives: amos, adam, adamw, sgd, lbfgs, any of optax."""

import difflib
import functools
import inspect
import logging
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from tekoa.bridges import detect
from tekoa.core import objective
from tekoa.estimator.config import UsageError
from tekoa.optim import amos, amos_helper, groups, scale

_log = logging.getLogger("tekoa")

# Where the config has no rate: what is usual for optimizers whose updates have unit size,
# and for plain gradients.
DEFAULT_RATE = 5e-4
DEFAULT_RATE_OF_GRADIENTS = 0.1

_RANGES = {
    "learning_rate": (0, math.inf),
    "beta": (0, 1),
    "momentum": (0, 1),
    "weight_decay": (0, math.inf),
}
_ON_GRADIENTS = ("sgd", "noisy_sgd", "optimistic_gradient_descent")
# How optax calls what the config calls momentum and beta.
_OPTAX_NAMES = {
    "momentum": ("b1", "momentum"),
    "beta": ("b2", "decay"),
    "weight_decay": ("weight_decay",),
}


def make_optimizer(
    opt_config: Any,
    *,
    n_batches: float,
    find_scales: Callable[[], scale.ScaleTable] | None = None,
    eta: Mapping[str, Any] | None = None,
    slot_shape: Mapping[str, Any] | None = None,
    clip_value: float | None = None,
) -> optax.GradientTransformation:
    """Makes the optimizer that a config names, and logs what of the config it uses.

    Args:
        opt_config: Has `optimizer`, and where they matter `learning_rate`, `momentum`, `beta`
            and `weight_decay`; None leaves each at the optimizer's own default, which for
            Amos is a rate of 1 / sqrt(n_batches). May have `groups`: other rates by pattern
            over names of parameters, 'bias$=0.01; ^embed=freeze', which are logged.
        n_batches: Batches in the training data.
        find_scales: For Amos without `eta`: gives the table of scales, such as
            `lambda: scales_of(...)`. Called only if it is needed.
        eta: For Amos: hand-set scales, regex of the name -> number or formula of `SHAPE`.
        slot_shape: For Amos with `eta`: shapes of the slots, likewise.
        clip_value: For Amos: gradients are clipped to plus or minus this.

    Raises:
        UsageError: If there is no such optimizer, or a number is out of range.

    >>> import types
    >>> tx = make_optimizer(types.SimpleNamespace(optimizer='sgd', learning_rate=0.5), n_batches=1)
    >>> tx.update({'w': 1.0}, tx.init({'w': 1.0}))[0]
    {'w': -0.5}
    """
    settings = _settings(opt_config)
    table = parse_groups(getattr(opt_config, "groups", None))
    name = str(getattr(opt_config, "optimizer", None))
    if name == "lbfgs":
        if table:
            raise UsageError("--module_config.opt_config.groups: lbfgs has no rates to set.")
        _log.info("Optimizer lbfgs: its line search finds the step; the rate is not used.")
        return optax.lbfgs()
    if name == "amos":
        found = None if eta is not None or find_scales is None else find_scales()
        make, rate = _amos(
            settings, n_batches, found, eta=eta, slot_shape=slot_shape, clip=clip_value
        )
    else:
        make, rate = _of_optax(name, settings)
    if not table:
        return make(rate)  # Its state is that of the original runner, whose steps go on here.
    _log.info("Rates by group: %s, and %.4g for the rest.", table, rate)
    return groups.groups({**table, ".*": rate}, make=make)


def parse_groups(text: str | None) -> dict[str, Any]:
    """Reads rates by pattern.

    Raises:
        UsageError: If a part is not `PATTERN=RATE` or `PATTERN=freeze`.

    >>> parse_groups('bias$=0.01; ^embed=freeze')
    {'bias$': 0.01, '^embed': 'freeze'}
    """
    table: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(";"))):
        pattern, _, value = (word.strip() for word in part.rpartition("="))
        rate = _rate(value)
        if not pattern or rate is None or not _is_pattern(pattern):
            raise UsageError(
                "--module_config.opt_config.groups must be 'PATTERN=RATE; ...', where a pattern is "
                f"a regular expression and a rate is above 0 or 'freeze'; got {part!r}."
            )
        table[pattern] = rate
    return table


def _rate(text: str) -> float | str | None:
    if text == "freeze":
        return text
    try:
        rate = float(text)
    except ValueError:
        return None
    return rate if 0 < rate < math.inf else None


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def scales_of(
    model: Any, loss: Callable[..., Any], sample: Any, *, split: objective.Split
) -> scale.ScaleTable:
    """Reads the scales of a model's parameters off its loss on a sample batch.

    Parameters are not made for it: only their shapes are needed.

    Args:
        model: All that a `TrainLoop` takes as a model.
        loss: `loss(*outputs, *targets)`.
        sample: One batch.
        split: Tells the inputs of a batch from its targets.
    """
    fns = detect.as_model_fns(model)
    rng = jax.random.key(0)
    inputs, targets = split(sample)
    params, _ = jax.eval_shape(fns.init, rng, inputs)
    variables = jax.jit(lambda rng, inputs: fns.init(rng, inputs)[1])(rng, inputs)

    def value(params: Any, variables: Any, inputs: Any, targets: Any) -> Any:
        # Without dropout: the scale is that of the model that is evaluated.
        outputs, _ = fns.apply(params, variables, inputs, rng=rng, train=False)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return loss(*outputs, *targets)

    return scale.scales(value, params, variables, inputs, targets)


def _settings(opt_config: Any) -> dict[str, float]:
    """The numbers that are given, checked."""
    found = {}
    for name, (low, high) in _RANGES.items():
        value = getattr(opt_config, name, None)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value < high or (name == "learning_rate" and not value):
            edge = "above 0" if name == "learning_rate" else f"in [{low}, {high})"
            raise UsageError(f"--module_config.opt_config.{name} must be {edge}, got {value!r}.")
        found[name] = value
    return found


def _amos(
    settings: Mapping[str, float],
    n_batches: float,
    table: scale.ScaleTable | None,
    *,
    eta: Mapping[str, Any] | None,
    slot_shape: Mapping[str, Any] | None,
    clip: float | None,
) -> tuple[Callable[..., Any], float]:
    if table is not None:
        _log.info("Scales for Amos, read off the model:\n%s", table)
        eta_fn, shape_fn = table.eta_fn, table.shape_fn
    elif eta is not None:
        eta_fn, shape_fn = _by_rules(eta), None if slot_shape is None else _by_rules(slot_shape)
    else:
        raise UsageError("Amos needs scales: this model gives none and no way to find them.")
    if not n_batches > 0:
        raise UsageError(f"Amos needs the number of batches in the data, got {n_batches!r}.")
    usual = 1 / math.sqrt(n_batches)
    rate = settings.get("learning_rate", usual)
    _log.info(
        "Optimizer amos: learning rate %.4g; 1/sqrt(%.4g batches) is %.4g.", rate, n_batches, usual
    )
    if rate < usual / 10:
        _log.warning(
            "The learning rate %.4g is small for Amos, which learns fast at 1/sqrt(number of "
            "batches) = %.4g: --module_config.opt_config.learning_rate=None takes that.",
            rate,
            usual,
        )
    make = functools.partial(
        amos.amos,
        eta_fn=eta_fn,
        shape_fn=shape_fn,
        beta=settings.get("beta", 0.999),
        momentum=settings.get("momentum") or None,  # 0 needs no slot.
        clip_value=clip,
    )
    return make, rate


def _by_rules(table: Mapping[str, Any]) -> Callable[..., Any]:
    return amos_helper.params_fn_from_assign_map(table, eval_str_value=True)


def _of_optax(name: str, settings: Mapping[str, float]) -> tuple[Callable[..., Any], float]:
    makers = _makers()
    if name not in makers:
        known = sorted([*makers, "amos", "lbfgs"])
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"There is no optimizer {name!r}.{hint} There are: {', '.join(known)}.")
    known = inspect.signature(makers[name]).parameters
    arguments: dict[str, Any] = {}
    for setting, words in _OPTAX_NAMES.items():
        word = next((word for word in words if word in known), None)
        if word is not None and setting in settings:
            arguments[word] = settings[setting]
    if not arguments.get("momentum"):
        arguments.pop("momentum", None)  # 0 needs no slot.
    usual = DEFAULT_RATE_OF_GRADIENTS if name in _ON_GRADIENTS else DEFAULT_RATE
    rate = settings.get("learning_rate", usual)
    _log.info("Optimizer %s: %s.", name, {"learning_rate": rate, **arguments})
    return lambda learning_rate: makers[name](learning_rate=learning_rate, **arguments), rate


def _makers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """The optimizers of optax that need a learning rate and nothing else."""
    return {
        name: make
        for name, make in vars(optax).items()
        if isinstance(make, (types.FunctionType, functools.partial)) and _fits(name, make)
    }


def _fits(name: str, make: Callable[..., Any]) -> bool:
    if name.startswith(("_", "scale_by")):
        return False
    parameters = inspect.signature(make).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return "learning_rate" in {p.name for p in parameters} and set(required) <= {"learning_rate"}
