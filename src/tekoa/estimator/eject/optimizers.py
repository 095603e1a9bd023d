"""The optimizer of a run as plain code: sphere and Amos written out, those of optax by name."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from tekoa.core import trees
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import pieces
from tekoa.estimator.eject.watch import Watch
from tekoa.estimator.model_file import optimizers
from tekoa.optim import muon, named, sphere
from tekoa.optim.amos import budget, slots, transform

# Functions whose calls say which optimizer a run has.
WATCHED: tuple[Callable[..., Any], ...] = (
    named.choose,
    optimizers.from_optax,
    optimizers.make_optimizer,
    sphere.sphere,
    sphere.step_size,
    sphere.anytime_step_size,
    transform.amos,
    budget.amos_for_budget,
    muon.muon_for,
)
# The constants of `sphere` that its plain form has; the others are part of the table of roles.
_IN_TABLE = {
    *("output_factor", "full_depth", "branch_depth_power", "divides_added", "branch_power"),
    "table_depth_power",
}
_IN_CODE = {"b1", "b2", "nesterov", "min_rms", "restarts"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainOptimizer:
    """An optimizer as code.

    Attributes:
        code: Definitions.
        call: The expression that creates it; None if the model file has it.
    """

    code: str
    call: str | None


def plain_optimizer(watch: Watch, params: Any) -> PlainOptimizer:
    """Returns the code of the optimizer whose creation was watched.

    Args:
        watch: What ran, with `WATCHED`.
        params: The parameters, or their shapes, in the order of the ejected file.

    Raises:
        UsageError: If it has no plain form.
    """
    for function, name in ((muon.muon_for, "muon"), (budget.amos_for_budget, "amos")):
        if watch.variables(function):
            raise UsageError(
                f"The optimizer {name!r} of this run has no plain form, so that it cannot be "
                "ejected. Runs with 'auto', with tekoa.amos or with optax can."
            )
    if calls := watch.variables(sphere.sphere):
        return _plain_sphere(_only(calls, "sphere"), watch, params)
    is_by_config = bool(watch.variables(optimizers.make_optimizer))
    if calls := watch.variables(transform.amos):
        return _plain_amos(_only(calls, "Amos"), params, is_written=not is_by_config)
    if calls := watch.variables(optimizers.from_optax):
        # The rate may be that of a group.
        if watch.variables(optimizers.make_optimizer)[-1].get("table"):
            raise UsageError("Rates by group have no plain form: this run cannot be ejected.")
        call = _only(calls, "optimizers")
        arguments = {"learning_rate": call["rate"], **call["arguments"]}
        return PlainOptimizer(code="", call=_call_of(call["name"], arguments))
    for call in watch.variables(named.choose):
        rate = call["rate"]
        arguments = {} if rate is None else {"learning_rate": rate}
        return PlainOptimizer(code="", call=_call_of(call["name"], arguments))
    return PlainOptimizer(code="", call=None)


def _only(calls: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    if len(calls) > 1:
        raise UsageError(f"This run has {len(calls)} {name}, so that it cannot be ejected.")
    return calls[0]


def _call_of(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the call of an optimizer of optax."""
    if name == "lbfgs":
        raise UsageError("lbfgs runs a line search in each step: this run cannot be ejected.")
    module = "optax" if hasattr(optax, name) else "optax.contrib"
    words = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{module}.{name}({words})"


def _plain_sphere(call: Mapping[str, Any], watch: Watch, params: Any) -> PlainOptimizer:
    table, rule = call["table"], sphere.SphereRule(**call["settings"])
    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    others = fields.keys() - _IN_TABLE - _IN_CODE
    if changed := [n for n in sorted(others) if fields[n] != _plain_value(n)]:
        raise UsageError(
            f"Sphere with {', '.join(changed)} has no plain form, so that this run cannot be "
            "ejected."
        )
    rows = {}
    for name, leaf in trees.named_leaves(params).items():
        row = table.row(name, leaf.shape)
        scale = rule.scale(row)
        if np.ndim(scale):
            raise UsageError(
                f"The scale of {'/'.join(name)!r} differs by slice, which has no plain form: this "
                "run cannot be ejected."
            )
        axes = tuple(i for i in range(len(row.shape)) if i not in row.role.batched)
        radius = None
        if row.role.kind in ("contracted", "looked up"):
            radius = "always" if sphere.has_radius(row) else "at first"
        rows["/".join(name)] = (
            float(scale),
            float(scale * rule.factor(row, table)),
            rule.is_divided(row),
            axes if row.role.batched else None,
            radius,
        )
    has_axes = any(row[3] is not None for row in rows.values())
    if not has_axes:
        rows = {name: (*row[:3], row[4]) for name, row in rows.items()}
    code = pieces.sphere(rows, rule, size=_step_size(call, watch), has_axes=has_axes)
    return PlainOptimizer(code=code, call="sphere()")


def _plain_value(name: str) -> Any:
    """Returns the value of a constant of sphere for which the plain form is written."""
    return {"is_reduced": False, "row_radius": False}.get(name)


def _step_size(call: Mapping[str, Any], watch: Watch) -> str:
    """Returns the code of the size of a step."""
    if calls := watch.variables(sphere.step_size):
        return pieces.step_size(calls[-1])
    if calls := watch.variables(sphere.anytime_step_size):
        return pieces.anytime_step_size(calls[-1])
    raise UsageError("Sphere with a learning rate of its own has no plain form.")


def _plain_amos(call: Mapping[str, Any], params: Any, *, is_written: bool) -> PlainOptimizer:
    fixed = {"extra_l2": 0.0, "d_coef": 0.25, "c_coef": 0.25, "epsilon": 2**-125}
    if changed := [name for name, value in fixed.items() if call[name] != value]:
        raise UsageError(
            f"Amos with {', '.join(changed)} has no plain form, so that this run cannot be ejected."
        )
    rows = {}
    for name, leaf in trees.named_leaves(params).items():
        eta = slots.eta_of(call["eta_fn"], name, leaf.shape)
        if np.ndim(eta):
            raise UsageError(f"The scale of {'/'.join(name)!r} is an array: it has no plain form.")
        rows["/".join(name)] = (
            eta.item(),
            slots.slot_shape_of(call["shape_fn"], name, leaf.shape),
        )
    leaves = zip(jax.tree.leaves(params), rows.values(), strict=True)
    by_slabs = any(_is_by_slabs(leaf, shape) for leaf, (_, shape) in leaves)
    code = pieces.amos(rows, by_slabs=by_slabs, has_momentum=call["momentum"] is not None)
    if is_written:  # The rate may be a function of the model file.
        return PlainOptimizer(code=code, call=None)
    numbers = {name: call[name] for name in ("beta", "momentum", "clip_value")}
    words = [f"{name}={value!r}" for name, value in numbers.items() if value is not None]
    call_words = ", ".join([repr(call["learning_rate"]), *words])
    return PlainOptimizer(code=code, call=f"amos({call_words})")


def _is_by_slabs(leaf: Any, shape: tuple[int, ...]) -> bool:
    aligned = (1,) * (len(leaf.shape) - len(shape)) + shape
    pairs = zip(leaf.shape, aligned, strict=True)
    axes = [i for i, (n, m) in enumerate(pairs) if m == 1 and n != 1]
    return axes == [0] and slots.has_slow_reductions(leaf)
