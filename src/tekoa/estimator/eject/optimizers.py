"""The optimizer of a run as code, read off its functions.

An optimizer is a pair of functions, and their variables are the arguments that it was created
with: `optax.adamw(0.1)` is written as the chain that it is. Amos and sphere become plain code, with
a table of the numbers of each parameter.
"""

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

from tekoa.core import trees
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import plain
from tekoa.estimator.eject import text as texts
from tekoa.estimator.eject.ran import recorded_lines
from tekoa.estimator.eject.source import Code
from tekoa.optim import named, orthogonal, sphere
from tekoa.optim.amos import slots, transform

_MODULES = (optax, optax.contrib)
# Arguments of `update` that only optimizers with a line search or the like use.
_NEEDS_LOSS = {"value", "value_fn", "obj_fn", "grad"}
# The settings of sphere for which the plain form is written; the others are in its table.
_SPHERE = {
    "b1": 0.9,
    "b2": 0.99,
    "min_rms": 0.2,
    "is_reduced": False,
    "nesterov": True,
    "n_iterations": 3,
}


class PlainOptimizer:
    """Writes an optimizer.

    Args:
        code: Collects functions of the model file, such as schedules.
        params: The parameters, or their shapes, in the order of the ejected file.
        is_single_cpu: Whether the run had a single device, a CPU.

    Attributes:
        blocks: Tables of the numbers of each parameter.
    """

    def __init__(self, code: Code, params: Any, *, is_single_cpu: bool):
        self._code, self._params, self._is_single_cpu = code, params, is_single_cpu
        self.blocks: list[str] = []

    def expression(self, tx: optax.GradientTransformation) -> str:
        """Returns the code that creates an optimizer.

        Raises:
            UsageError: If it has no plain form.
        """
        if isinstance(tx, named.NamedOptimizer):
            if tx.name not in named.BY_SCALES:
                return self._by_name(tx)
            if tx.name == "muon":
                raise UsageError("The optimizer 'muon' has no plain form: it cannot be ejected.")
            tx = tx.resolved
        variables = variables_of(tx)
        name = _factory_name(tx.update)
        if name == "with_extra_args_support":
            return self.expression(variables["tx"])
        if name == "in_float32" and self._is_float32():
            return self.expression(variables["tx"])
        if name == "chain":
            parts = [
                optax.GradientTransformation(*pair)
                for pair in zip(variables["init_fns"], variables["update_fns"], strict=True)
            ]
            return self._chain([_unwrapped(part) for part in parts])
        if _own(tx.update) is transform.scale_by_amos:
            return self._amos(variables)
        return self._brick(tx, variables)

    def _by_name(self, tx: named.NamedOptimizer) -> str:
        if _needs_loss(tx, self._params):
            raise UsageError(
                f"The optimizer {tx.name!r} needs the loss in each step: this run cannot be "
                "ejected."
            )
        rate = tx.facts["learning_rate"]
        module = "optax" if hasattr(optax, tx.name) else "optax.contrib"
        return f"{module}.{tx.name}({'' if rate is None else f'learning_rate={rate!r}'})"

    def _chain(self, parts: list[optax.GradientTransformation]) -> str:
        if _own(parts[-1].update) is sphere.project_to_sphere:
            return self._sphere(parts)
        words = [self.expression(part) for part in parts]
        return f"optax.chain({', '.join(words)})"

    def _brick(self, tx: optax.GradientTransformation, variables: Mapping[str, Any]) -> str:
        """Returns the call of a function of optax."""
        name = _factory_name(tx.update) or _factory_name(tx.init)
        factory = next((vars(m)[name] for m in _MODULES if name in vars(m)), None)
        module = "optax" if hasattr(optax, name) else "optax.contrib"
        if factory is None or _NEEDS_LOSS & inspect.signature(tx.update).parameters.keys():
            raise UsageError(
                f"The optimizer of this run uses {name!r}, which has no plain form, so that it "
                "cannot be ejected. Runs with auto, Amos, or chains of optax can."
            )
        if name == "scale_by_schedule":
            inner = variables["step_size_fn"]
            if _factory_name(inner) == "scale_by_learning_rate":
                rate = inspect.getclosurevars(inner).nonlocals
                flip = "" if rate["m"] == -1 else ", flip_sign=False"
                schedule = self._schedule(rate["learning_rate"])
                return f"optax.scale_by_learning_rate({schedule}{flip})"
        arguments = {
            p.name: variables[p.name]
            for p in inspect.signature(factory).parameters.values()
            if p.name in variables and not _is_same(variables[p.name], p.default)
        }
        if not _has_variables(factory, arguments, variables):
            raise UsageError(
                f"The arguments of {module}.{name} in the optimizer of this run cannot be read, so "
                "that it cannot be ejected."
            )
        words = [f"{key}={self._value(value)}" for key, value in arguments.items()]
        return f"{module}.{name}({', '.join(words)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, optax.GradientTransformation):
            return self.expression(value)
        if isinstance(value, np.dtype):
            return f"jnp.{value.name}"
        return self._schedule(value) if callable(value) else self._code.expression(value)

    def _schedule(self, value: Any) -> str:
        """Returns the code of a learning rate."""
        if not callable(value):
            return self._code.expression(value)
        name = _factory_name(value)
        if value.__module__.startswith("optax.") and hasattr(optax, name):
            variables = inspect.getclosurevars(value).nonlocals
            parameters = inspect.signature(getattr(optax, name)).parameters
            words = [f"{k}={self._values(variables[k])}" for k in parameters if k in variables]
            return f"optax.{name}({', '.join(words)})"
        return self._code.call(value, "", "learning_rate").removesuffix("()")

    def _values(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._values(item) for item in value)}]"
        return self._schedule(value)

    def _is_float32(self) -> bool:
        return all(leaf.dtype == np.float32 for leaf in trees.named_leaves(self._params).values())

    def _amos(self, variables: Mapping[str, Any]) -> str:
        _require("Amos", variables, extra_l2=0.0, d_coef=0.25, c_coef=0.25, epsilon=2**-125)
        init = variables["args"]
        rows = {}
        for name, leaf in trees.named_leaves(self._params).items():
            eta = slots.eta_of(init[0], name, leaf.shape)
            if np.ndim(eta):
                raise UsageError(f"The scale of {'/'.join(name)!r} is an array: no plain form.")
            shape = slots.slot_shape_of(init[1], name, leaf.shape)
            rows["/".join(name)] = (eta.item(), shape)
        leaves = trees.named_leaves(self._params).values()
        by_slabs = self._is_single_cpu and any(map(slots.is_large, leaves))
        self._write_table("SCALES", "its scale, and the shape of its slots", rows)
        rate = variables["learning_rate"]
        schedule = self._schedule(rate) if callable(rate) else f"lambda step: {rate!r}"
        same_rate: Any = rate if callable(rate) else lambda step: rate
        self._add_as_it_runs(plain.amos(same_rate, variables["beta"], rows, by_slabs), "amos")
        return f"amos({schedule}, {variables['beta']!r}, SCALES, {by_slabs})"

    def _sphere(self, parts: list[optax.GradientTransformation]) -> str:
        first, rate, _ = parts
        if _factory_name(first.update) == "restart_after_first":
            first = _unwrapped(variables_of(first)["tx"])
        if _own(first.update) is not sphere.scale_by_sphere:
            name = _factory_name(first.update)
            raise UsageError(f"The optimizer {name!r} has no plain form: it cannot be ejected.")
        rule, table = (variables_of(first)[name] for name in ("rule", "table"))
        _require("Sphere", vars(rule), **_SPHERE)
        if not self._is_float32():
            raise UsageError(
                "Sphere has a plain form for float32 only: this run cannot be ejected."
            )
        rows = {}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._params)]
        for path, (name, leaf) in zip(paths, trees.named_leaves(self._params).items(), strict=True):
            row = table.row(name, leaf.shape)
            scale = rule.scale(row)
            if np.ndim(scale) or row.role.batched:
                raise UsageError(
                    f"{'/'.join(name)!r} consists of several kernels, which has no plain form: "
                    "this run cannot be ejected."
                )
            radius = None
            if row.role.kind in ("contracted", "looked up"):
                radius = "at first" if rule.start(row) else "always"
            direction = "divided" if rule.is_divided(row) else None
            if rule.is_orthogonal(row):
                direction = orthogonal.blocks_of(row.shape, row.role, rule.max_side)
            numbers = scale * (rule.start(row) or 1), scale * rule.factor(row, table)
            role = (*map(_in_float32, numbers), direction, radius)
            key = jax.tree_util.keystr(path, simple=True, separator="/")
            same = [names for names in rows if rows[names] == role]
            if same and len(_row(f"{same[-1]} {key}", role)) <= texts.WIDTH:
                rows.pop(same[-1])
                key = f"{same[-1]} {key}"
            rows[key] = role
        self._write_table(
            "ROLES",
            "scale, size of its steps, what is done with their direction (divided by\n# its rms, "
            "or orthogonalised: order of axes, shape of blocks), and when it is set to its scale",
            rows,
        )
        self._add_as_it_runs(plain.sphere(lambda n: n, rows), "sphere")
        self._code.blocks["step_size"] = _step_size(rate)
        return "sphere(step_size, ROLES)"

    def _add_as_it_runs(self, tx: optax.GradientTransformation, name: str) -> None:
        """Adds a plain optimizer, without what it does not do for these parameters."""
        with recorded_lines(lambda path: path == plain.__file__) as ran:
            state = jax.eval_shape(tx.init, self._params)
            jax.eval_shape(tx.update, self._params, state, self._params)
        self._code.leave_out_what_did_not_run(ran)
        self._code.add_definition(plain, name)

    def _write_table(self, name: str, what: str, rows: Mapping[str, tuple[Any, ...]]) -> None:
        lines = "\n".join(_row(*row) for row in rows.items())
        self.blocks.append(f"# Of each parameter: {what}.\n{name} = {{\n{lines}\n}}")


def _needs_loss(tx: optax.GradientTransformation, params: Any) -> bool:
    """Whether `update` needs more than gradients, state and parameters."""
    try:
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    except (TypeError, KeyError, ValueError):
        return True
    return False


def _row(key: str, values: tuple[Any, ...]) -> str:
    return f"    {key!r}: {values!r},".replace("'", '"')


def _step_size(rate: optax.GradientTransformation) -> str:
    """Returns the function that computes the size of a step of sphere, as code."""
    size = inspect.getclosurevars(variables_of(rate)["step_size_fn"]).nonlocals["learning_rate"]
    values = inspect.getclosurevars(size).nonlocals
    if _own(size) is sphere.step_size:
        _require("Sphere", {"tail": values["decay"](0.25)}, tail=0.75)
        n_warmup, n_steps = values["n_warmup"], values["n_steps"]
        then = "0"
        lines = f"""    rise = jnp.minimum(1.0, (n + 1) / {max(n_warmup, 1)})
    fall = 1 - jnp.clip((n + 1 - {n_warmup}) / {n_steps + 1 - n_warmup}, 0.0, 1.0)
    return {values["peak"]!r} * rise * fall"""
    elif _own(size) is sphere.anytime_step_size:
        then = "0 like 1 / sqrt(n)"
        lines = f"""    done, n_warmup = jnp.asarray(n + 1, jnp.float32), {values["n_warmup"]}
    rise = jnp.minimum(1.0, done / n_warmup)
    return {0.5 * values["c"]!r} * rise / jnp.sqrt(2 * jnp.maximum(done, n_warmup))"""
    else:
        raise UsageError("Sphere with a learning rate of its own has no plain form.")
    start = f'"""Returns the relative size of step n: it rises, then decreases to {then}."""'
    return f"def step_size(n):\n    {start}\n{lines}"


def variables_of(tx: optax.GradientTransformation) -> dict[str, Any]:
    """Returns the variables of the functions of an optimizer.

    >>> variables_of(optax.scale(0.5))
    {'step_size': 0.5}
    """
    variables: dict[str, Any] = {}
    for function in (tx.init, tx.update):
        if isinstance(function, types.FunctionType):
            variables.update(inspect.getclosurevars(function).nonlocals)
        else:  # A partial.
            variables["args"] = getattr(function, "args", ())
    return variables


def _unwrapped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns what `optax.with_extra_args_support` made accept more arguments."""
    if _factory_name(tx.update) == "with_extra_args_support":
        return variables_of(tx)["tx"]
    return tx


def _factory_name(function: Any) -> str:
    """Returns the name of the function that created another, or "".

    >>> _factory_name(optax.scale(0.5).update)
    'scale'
    """
    return getattr(function, "__qualname__", "").partition(".<locals>")[0]


def _own(function: Any) -> Callable[..., Any] | None:
    """Returns the function of Tekoa that created another."""
    module = getattr(function, "__module__", "")
    return getattr(sys.modules[module], _factory_name(function), None) if module else None


def _is_same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same: equal, or functions with the same variables."""
    if isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType):
        return a.__code__ is b.__code__
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a is b or (type(a) is type(b) and bool(np.all(a == b)))


def _in_float32(x: float) -> float:
    """Returns the number with the fewest digits that is the same in float32.

    >>> _in_float32(0.0883883917667997)
    0.08838839
    """
    return float(str(np.float32(x)))


def _has_variables(
    factory: Callable[..., Any], arguments: Mapping[str, Any], variables: Mapping[str, Any]
) -> bool:
    """Whether a function creates, from these arguments, an optimizer with these variables."""
    try:
        tx = factory(**arguments)
    except TypeError:  # An argument is missing.
        return False
    if not isinstance(tx, optax.GradientTransformation):
        return False
    rebuilt = variables_of(tx)
    return all(_is_same(rebuilt.get(key), value) for key, value in variables.items())


def _require(what: str, values: Mapping[str, Any], **plain: Any) -> None:
    if changed := [name for name, value in plain.items() if values.get(name, value) != value]:
        raise UsageError(
            f"{what} with {', '.join(changed)} has no plain form, so that this run cannot be "
            "ejected."
        )
