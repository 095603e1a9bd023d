"""Optimizers by name: "auto", "sphere", "muon", "amos", and all of optax and optax.contrib.

A name can be turned into an optimizer only when the model, the loss, a batch and the number
of steps are known. `NamedOptimizer` holds the place of the optimizer until then; training
loops resolve it before the first step.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax
import optax.contrib

from tekoa.core import messages
from tekoa.optim import muon, sphere
from tekoa.optim.amos import budget, transform
from tekoa.optim.scales.table import ScaleTable

# Used for optimizers that require a rate: those whose updates have unit size, and those that
# follow plain gradients.
DEFAULT_RATE = 5e-4
DEFAULT_RATE_OF_GRADIENTS = 0.1
RATE_OF_AMOS = 0.01  # Of its published form: 1 / sqrt(10,000 batches of data).
_ON_GRADIENTS = ("sgd", "noisy_sgd", "optimistic_gradient_descent", "lars", "fromage")
BY_SCALES = ("auto", "sphere", "muon", "amos")  # Those that need a table of scales.

Make = Callable[..., optax.GradientTransformation]
FindTable = Callable[[], ScaleTable]


class OtherRulesError(ValueError):
    """A run was started with other rules of an optimizer than those of this version."""


class NamedOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer that is chosen by name once the model and the data are known.

    It is an optax transformation; `init` and `update` work after `resolve`. The second argument
    is a rate in place of the default, for optimizers of optax.

    Attributes:
        name: "auto", "sphere", "muon", "amos", or a name of optax or optax.contrib.
        facts: What a resumed run needs to choose the same optimizer.

    Raises:
        ValueError: If there is no such optimizer.

    >>> optimizer = NamedOptimizer('sgd')
    >>> optimizer.resolve(lambda: ScaleTable([]), n_steps=10)
    'Optimizer sgd: learning rate 0.1.'
    >>> optimizer.update({'w': 1.0}, optimizer.init({'w': 1.0}))[0]
    {'w': -0.1}
    """

    name: str
    facts: dict[str, Any]
    _rate: float | None
    _cell: list[optax.GradientTransformationExtraArgs]

    def __new__(cls, name: str, learning_rate: float | None = None) -> "NamedOptimizer":
        check_name(name)
        cell: list[optax.GradientTransformationExtraArgs] = []

        def resolved() -> optax.GradientTransformationExtraArgs:
            if not cell:
                raise ValueError(
                    f"The optimizer {name!r} is not resolved yet: it depends on the model and the "
                    "data. Pass it to a TrainLoop, or use tekoa.auto_for(loss, params, *batch)."
                )
            return cell[-1]

        self = super().__new__(
            cls,
            lambda params: resolved().init(params),
            lambda updates, state, params=None, **extra: resolved().update(
                updates, state, params, **extra
            ),
        )
        self.name, self.facts, self._rate, self._cell = name, {}, learning_rate, cell
        return self

    @property
    def resolved(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer that was chosen; an error before `resolve`."""
        return self._cell[-1]

    def resolve(
        self,
        find_table: FindTable,
        *,
        n_steps: int | None,
        saved: Mapping[str, Any] | None = None,
    ) -> str:
        """Chooses the optimizer.

        Args:
            find_table: Returns the scales of the model; called only if they are needed.
            n_steps: The number of steps of the training run, or None if it is not known.
            saved: `facts` of an earlier part of the same run, whose scales are used again.

        Returns:
            One line about the choice.
        """
        choice = choose(
            self.name, find_table, n_steps=n_steps, saved=saved, learning_rate=self._rate
        )
        self._cell.append(optax.with_extra_args_support(choice.optimizer))
        self.facts = choice.facts
        return choice.text


def as_optimizer(optimizer: optax.GradientTransformation | str) -> optax.GradientTransformation:
    """Returns an optimizer; for a name, the placeholder of that optimizer."""
    return NamedOptimizer(optimizer) if isinstance(optimizer, str) else optimizer


def without_model(name: str) -> optax.GradientTransformation:
    """Creates an optimizer that needs neither the model nor the data.

    Raises:
        ValueError: If there is no such optimizer, or it is chosen by the scales of a model.

    >>> without_model('sgd').update({'w': 1.0}, without_model('sgd').init({'w': 1.0}))[0]
    {'w': -0.1}
    """
    if name in BY_SCALES:
        raise ValueError(
            f"The optimizer {name!r} depends on the model, the data and the number of steps. Pass "
            "the name to fit or a TrainLoop, or create it: tekoa.auto_for(loss, params, *batch)."
        )
    return choose(name, lambda: ScaleTable([]), n_steps=None).optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """An optimizer that was chosen by name."""

    optimizer: optax.GradientTransformation
    text: str  # One line about it.
    facts: dict[str, Any]  # What a resumed run needs to choose the same, as JSON values.


def choose(
    name: str,
    find_table: FindTable,
    *,
    n_steps: int | None,
    saved: Mapping[str, Any] | None = None,
    learning_rate: float | None = None,
) -> Choice:
    """Creates the optimizer with this name; arguments are those of `NamedOptimizer`."""
    check_name(name)
    if name not in BY_SCALES:
        make = makers()[name]
        rate = default_rate(name) if learning_rate is None else learning_rate
        optimizer = make() if rate is None else make(learning_rate=rate)
        settings = "with its default settings" if rate is None else f"learning rate {rate:g}"
        separator = " " if rate is None else ": "
        text = f"Optimizer {name}{separator}{settings}."
        return Choice(optimizer=optimizer, text=text, facts={"name": name, "learning_rate": rate})
    table, before = find_table(), ""
    if saved is not None and saved.get("name") == name:
        table = table.with_etas(saved["eta"])
        if saved["n_steps"] != n_steps:
            before = f" The earlier part of this run was planned for {_length(saved['n_steps'])}."
    facts = {"name": name, "n_steps": n_steps, "eta": table.etas}
    if name == "amos":
        optimizer = _make_amos(table, n_steps=n_steps)
    else:
        _check_rules(name, saved)
        facts["rule"] = sphere.RULES_VERSION
        make = _make_muon if name == "muon" else sphere.auto_sphere
        optimizer = make(table, n_steps=n_steps)
    return Choice(optimizer=optimizer, text=_describe(name, table, n_steps) + before, facts=facts)


def rate_at(facts: Mapping[str, Any], step: int) -> float | None:
    """Returns the learning rate of a step, from the `facts` of an optimizer; None if unknown.

    That of "auto", "sphere" and "muon" is the size of a step relative to the parameters.

    Args:
        facts: Those of a `NamedOptimizer`.
        step: The number of the step, counted from 1.

    >>> rate_at({'name': 'adamw', 'learning_rate': 0.5}, 3)
    0.5
    """
    if facts.get("name") not in ("auto", "sphere", "muon"):
        return facts.get("learning_rate")
    n_steps = facts["n_steps"]
    size = sphere.anytime_step_size() if n_steps is None else sphere.step_size(n_steps)
    return np.asarray(size(step - 1)).item()


def _check_rules(name: str, saved: Mapping[str, Any] | None) -> None:
    """Raises `OtherRulesError` if the earlier part of a run had other rules of sphere."""
    if saved is None or saved.get("name") != name:
        return
    version = saved.get("rule", 1)
    if version != sphere.RULES_VERSION:
        raise OtherRulesError(
            f"This run was started with version {version!r} of the rules of {name!r}; this Tekoa "
            f"has version {sphere.RULES_VERSION}. Resume it with the Tekoa that started it, or "
            "start a new run."
        )


def check_name(name: str) -> None:
    """Raises `ValueError`, with the closest name, if there is no such optimizer."""
    if name in BY_SCALES or name in makers():
        return
    names = sorted({*BY_SCALES, *makers()})
    hint = messages.did_you_mean(name, names)
    raise ValueError(f"There is no optimizer {name!r}.{hint} Choose from: {', '.join(names)}.")


def default_rate(name: str) -> float | None:
    """Returns the rate of an optimizer of optax if none is set; None to use its own default."""
    rate = inspect.signature(makers()[name]).parameters.get("learning_rate")
    if rate is None or rate.default is not rate.empty:
        return None
    return DEFAULT_RATE_OF_GRADIENTS if name in _ON_GRADIENTS else DEFAULT_RATE


@functools.cache
def makers() -> dict[str, Make]:
    """Returns the optimizers of optax and optax.contrib that require at most a learning rate."""
    makers_by_name: dict[str, Make] = {
        name: make
        for module in (optax.contrib, optax)
        for name, make in vars(module).items()
        if isinstance(make, (types.FunctionType, functools.partial)) and _is_optimizer(name, make)
    }
    makers_by_name["sophia"] = _with_loss(makers_by_name["sophia"])
    makers_by_name["polyak_sgd"] = _polyak_sgd
    return makers_by_name


def _polyak_sgd(learning_rate: float = 1.0) -> optax.GradientTransformationExtraArgs:
    return optax.polyak_sgd(max_learning_rate=learning_rate)


def _with_loss(make: Make) -> Make:
    """Returns `make` for optimizers that expect the loss, the step's `value_fn`, as `obj_fn`."""

    @functools.wraps(make)
    def make_with_loss(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        tx = optax.with_extra_args_support(make(*args, **kwargs))

        def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
            loss = extra_args.pop("value_fn")
            return tx.update(updates, state, params, obj_fn=loss, **extra_args)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    return make_with_loss


def _is_optimizer(name: str, make: Callable[..., Any]) -> bool:
    if name.startswith(("_", "scale_by")):
        return False
    parameters = inspect.signature(make).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return "learning_rate" in {p.name for p in parameters} and set(required) <= {"learning_rate"}


def _make_muon(table: ScaleTable, *, n_steps: int | None) -> optax.GradientTransformation:
    rate = sphere.anytime_step_size() if n_steps is None else None
    return muon.muon_for(table, n_steps=n_steps, learning_rate=rate)


def _make_amos(table: ScaleTable, *, n_steps: int | None) -> optax.GradientTransformation:
    if n_steps is None:
        return transform.amos(RATE_OF_AMOS, table.eta_fn, table.shape_fn)
    return budget.amos_for_budget(n_steps, table.eta_fn, table.shape_fn)


def _describe(name: str, table: ScaleTable, n_steps: int | None) -> str:
    n_kept = sum(sphere.has_radius(row) and not sphere.SphereRule().start(row) for row in table)
    n_outputs = sum(row.role.is_kernel and row.role.is_output for row in table)
    kind = "sphere" if name == "auto" else name
    title = f"Optimizer {name}" + (f" ({kind})" if kind != name else "")
    unplaced = f", {len(table.unplaced)} without a known use" if table.unplaced else ""
    counts = f"hidden kernels on their scale: {n_kept}, outputs: {n_outputs}"
    if name == "amos":
        counts = f"scales found for {len(table)} parameters"
        if n_steps is None:
            counts += f"; the published form, learning rate {RATE_OF_AMOS:g}"
    return f"{title}: planned for {_length(n_steps)}; {counts}{unplaced}."


def _length(n_steps: int | None) -> str:
    return "an unknown number of steps" if n_steps is None else f"{n_steps} steps"
