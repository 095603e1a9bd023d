"""The interpreter: reads a model equation by equation and notes how parameters are used.

It runs the jaxpr once, on real arrays or on bags. Values that do not come from a
parameter are computed as they are; where a parameter is met, a rule from the tables it is
given decides (`scale_moves`, `scale_consume`, `scale_control`).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tekoa.optim import scale_bags, scale_uses, scale_views
from tekoa.optim.scale_values import BATCH, Bag, Value

Rule = Callable[["Reader", Any, list[Value]], list[Value]]

# From here on an array is not made when only shapes are known, not even a constant mask.
HUGE = 2**22

# After these a value is still the result of the contraction that gave it.
LINEAR = {
    "add",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "div",
    "dynamic_slice",
    "mul",
    "neg",
    "reshape",
    "select_n",
    "slice",
    "squeeze",
    "sub",
    "transpose",
}
# Values that meet here live in one space, and should be of one scale.
SAME_SPACE = {"add", "concatenate"}


class Reader:
    """The state of one reading of a model."""

    def __init__(
        self,
        *,
        always: Mapping[str, Rule],
        on_views: Mapping[str, Rule],
        shapes_only: bool,
        known: Mapping[int, float],
        targets: Mapping[int, float],
    ):
        """Starts a reading.

        Args:
            always: Rules by primitive name that apply whatever the inputs are.
            on_views: Rules that apply where an input is a parameter.
            shapes_only: Whether the batch is known by its shapes only.
            known: Scales of tied embeddings that an earlier reading found.
            targets: The rms that a kernel's result shall have where it is not 1.
        """
        self.ledger = scale_uses.Ledger()
        self.shapes_only = shapes_only
        self.known, self.targets = known, targets
        self._always, self._on_views = always, on_views
        self._n_fresh = 0
        self._drawn: dict[Any, np.ndarray] = {}

    def run(self, jaxpr: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Reads a jaxpr; gives the values of its outputs."""
        consts = jaxpr.consts if isinstance(jaxpr, core.ClosedJaxpr) else ()
        jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
        env = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
        env |= dict(zip(jaxpr.invars, inputs, strict=True))
        # So that no more is held than the model itself needs.
        last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if _is_var(v)}
        kept = {v for v in jaxpr.outvars if _is_var(v)}
        for i, eqn in enumerate(jaxpr.eqns):
            ins = [_read(v, env) for v in eqn.invars]
            env |= dict(zip(eqn.outvars, self._equation(eqn, ins), strict=True))
            for v in {v for v in eqn.invars if _is_var(v)} - kept:
                if last[v] == i:
                    env.pop(v, None)
        return [_read(v, env) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in self._always:
            return self._always[name](self, eqn, inputs)
        if any(value.views for value in inputs):
            if name in self._on_views:
                return self._on_views[name](self, eqn, inputs)
            self.note(inputs, f"used by {name!r}, for which there is no rule")
        return self.plain(eqn, inputs)

    def plain(
        self, eqn: Any, inputs: Sequence[Value], data: Sequence[Any] | None = None
    ) -> list[Value]:
        """Computes an equation, on `data` instead of the inputs' own if given."""
        data = [value.data for value in inputs] if data is None else list(data)
        return self.outputs(eqn, inputs, self._execute(eqn, data))

    def outputs(self, eqn: Any, inputs: Sequence[Value], data: Sequence[Any]) -> list[Value]:
        """Wraps data computed from `inputs` as the outputs of an equation."""
        deps = union(inputs)
        sources = {value.source for value in inputs if value.source}
        if eqn.primitive.name in SAME_SPACE and len(sources) > 1:
            self.ledger.neighbours.append({param for source in sources for param in source})
        is_linear = eqn.primitive.name in LINEAR and len(sources) == 1
        return [
            Value(
                shape=tuple(var.aval.shape),
                dtype=var.aval.dtype,
                data=x,
                deps=deps if jnp.issubdtype(var.aval.dtype, jnp.inexact) else deps & BATCH,
                source=min(sources) if is_linear else (),
            )
            for var, x in zip(eqn.outvars, data, strict=True)
        ]

    def _execute(self, eqn: Any, data: list[Any]) -> list[Any]:
        sizes = [math.prod(var.aval.shape) for var in eqn.outvars if hasattr(var.aval, "shape")]
        too_large = self.shapes_only and max(sizes, default=0) > HUGE
        in_mesh = eqn.primitive.name in scale_bags.MESH_OPS
        if too_large or in_mesh or any(isinstance(x, Bag) for x in data):
            return scale_bags.execute(eqn, data, self.rng())
        out = eqn.primitive.bind(*data, **eqn.params)
        return list(out) if eqn.primitive.multiple_results else [out]

    def note(self, inputs: Sequence[Value], reason: str) -> None:
        """Notes for every parameter among the inputs why it gets no scale here."""
        for view in (view for value in inputs for view in value.views):
            self.ledger.note(view, reason)

    def rng(self) -> np.random.Generator:
        """Gives new randomness, the same on every reading."""
        self._n_fresh += 1
        return np.random.default_rng([1, self._n_fresh])

    def normal(self, value: Value, order: Sequence[int], n_batch: int = 0) -> np.ndarray:
        """Draws standard normals in place of a parameter.

        Args:
            value: The parameter, or several joined.
            order: Its axes, contracted ones before free ones. Entries are drawn in this
                order, so the same model in another layout gets the same numbers.
            n_batch: How many axes at the start of `order` all get the same numbers, so
                that an ensemble is read like each of its members.
        """
        shape = tuple(value.shape[i] for i in order)
        members, shape = shape[:n_batch], shape[n_batch:]
        key = (self.ledger.order(value.views[0]), shape)
        if key not in self._drawn:
            self._drawn[key] = _balanced_normal(shape, key[0])
        drawn = np.broadcast_to(self._drawn[key], members + shape)
        return drawn.transpose(np.argsort(order)).astype(value.dtype)


def constant(x: Any, aval: Any = None) -> Value:
    """Wraps a constant of the model."""
    if aval is not None and not hasattr(x, "dtype"):
        x = np.asarray(x, aval.dtype)
    return Value(shape=tuple(np.shape(x)), dtype=x.dtype, data=x)


def union(values: Sequence[Value]) -> int:
    """What any of these values depends on, as in `Value.deps`."""
    return functools.reduce(operator.or_, (value.deps for value in values), 0)


def with_views(value: Value, views: Sequence[scale_views.View]) -> Value:
    """Marks a value as being these parameters."""
    return dataclasses.replace(value, views=tuple(views))


def _read(v: core.Var | core.Literal, env: Mapping[core.Var, Value]) -> Value:
    return constant(v.val, v.aval) if isinstance(v, core.Literal) else env[v]


def _is_var(v: Any) -> TypeGuard[core.Var]:
    return not isinstance(v, core.Literal)


def _balanced_normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draws standard normals whose features come in pairs of opposite sign.

    So what follows a rectifier is measured without the luck of the draw. Which features
    are pairs differs by seed, so that products of two such results are not biased.
    """
    rng = np.random.default_rng([0, seed])
    n_features = shape[-1] if shape else 1
    half = rng.standard_normal((*shape[:-1], -(-n_features // 2)), np.float32)
    pairs = np.concatenate([half, -half], axis=-1)[..., :n_features]
    order = np.random.default_rng([2, seed]).permutation(n_features)
    return pairs[..., order].reshape(shape)
