"""The interpreter: evaluates a jaxpr equation by equation and records how parameters are used.

Equations run on real arrays, or on `Samples` if only shapes are known. Those that involve no
parameter are computed as usual; the others are handled by the rules in `rules`.
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

from tekoa.optim.scales import eager, uses
from tekoa.optim.scales import views as views_lib
from tekoa.optim.scales.rules import samples
from tekoa.optim.scales.values import BATCH, Samples, Value

Rule = Callable[["Reader", Any, list[Value]], list[Value]]

# If only shapes are known, larger arrays are not created, not even constant masks.
HUGE = 2**22

# fmt: off
# The result of these still counts as the output of the contraction it comes from.
LINEAR = {
    "add", "broadcast_in_dim", "convert_element_type", "copy", "div", "dynamic_slice", "mul", "neg",
    "reshape", "select_n", "slice", "squeeze", "sub", "transpose",
}
# fmt: on
# Values combined by these are in the same space and should have the same scale.
SAME_SPACE = {"add", "concatenate"}
# fmt: off
# After these, rows that the batch has selected are still those rows.
MOVES_ROWS = {
    "broadcast_in_dim", "convert_element_type", "copy", "reduce_precision", "reshape",
    "sharding_constraint", "squeeze", "transpose",
}
# These decide by themselves what selected rows are.
HANDLES_ROWS = {
    "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "dot_general", "jit", "pjit", "remat", "remat2",
}
# fmt: on


class Reader:
    """Interprets a jaxpr and records how parameters are used."""

    def __init__(
        self,
        *,
        always: Mapping[str, Rule],
        on_views: Mapping[str, Rule],
        shapes_only: bool,
        tied_scales: Mapping[int, float],
        targets: Mapping[int, float],
    ):
        """Creates a reader for one run over a model.

        Args:
            always: Rules by primitive name that apply to all inputs.
            on_views: Rules that apply if an input is a parameter.
            shapes_only: Whether only the shapes of the batch are known.
            tied_scales: Scales of tied embeddings, from an earlier run.
            targets: The rms that a kernel's result should have, if not 1.
        """
        self.record = uses.UseRecord()
        self.shapes_only = shapes_only
        self.tied_scales, self.targets = tied_scales, targets
        self.lookups: dict[int, uses.Use] = {}  # How the batch selects rows of a parameter.
        self._always, self._on_views = always, on_views
        self._n_rngs = 0
        self._draws: dict[Any, np.ndarray] = {}

    def run(self, jaxpr: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Interprets a jaxpr and returns the values of its outputs."""
        consts = ()
        if isinstance(jaxpr, core.ClosedJaxpr):
            jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
        env = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
        env |= dict(zip(jaxpr.invars, inputs, strict=True))
        # Values are freed after their last use, so that memory stays that of the model.
        last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if _is_var(v)}
        outvars = {v for v in jaxpr.outvars if _is_var(v)}
        for i, eqn in enumerate(jaxpr.eqns):
            eqn_inputs = [_read(v, env) for v in eqn.invars]
            env |= dict(zip(eqn.outvars, self._run_equation(eqn, eqn_inputs), strict=True))
            for v in {v for v in eqn.invars if _is_var(v)} - outvars:
                if last_use[v] == i:
                    env.pop(v, None)
        return [_read(v, env) for v in jaxpr.outvars]

    def _run_equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        if any(value.gathered for value in inputs):
            if eqn.primitive.name in MOVES_ROWS:
                return self._move_rows(eqn, inputs)
            if eqn.primitive.name not in HANDLES_ROWS:
                inputs = [self.settle(value) for value in inputs]
        outs = self._apply_rule(eqn, inputs)
        new_uses = self.record.take_new_bits()
        if not new_uses:
            return outs
        return [dataclasses.replace(out, uses=out.uses | new_uses) for out in outs]

    def _apply_rule(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in self._always:
            return self._always[name](self, eqn, inputs)
        if any(value.views for value in inputs):
            if name in self._on_views:
                return self._on_views[name](self, eqn, inputs)
            self.note(inputs, f"used by {name!r}, for which there is no rule")
        return self.plain(eqn, inputs)

    def _move_rows(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Moves rows that the batch has selected, which may yet turn out to be kernels."""
        as_views = [with_views(value, value.gathered) for value in inputs]
        outs = self._on_views[eqn.primitive.name](self, eqn, as_views)
        if not all(out.views for out in outs):
            return self.plain(eqn, [self.settle(value) for value in inputs])
        return [dataclasses.replace(out, views=(), gathered=out.views) for out in outs]

    def settle(self, value: Value) -> Value:
        """Records rows that the batch has selected as rows of an embedding."""
        for view in value.gathered:
            self.record.add(view, self.lookups[view.param])
        new_uses = self.record.take_new_bits()
        return dataclasses.replace(value, gathered=(), uses=value.uses | new_uses)

    def plain(
        self, eqn: Any, inputs: Sequence[Value], data: Sequence[Any] | None = None
    ) -> list[Value]:
        """Computes an equation without a rule, on `data` instead of the inputs' own if passed."""
        data = [value.data for value in inputs] if data is None else list(data)
        return self.outputs(eqn, inputs, self._execute(eqn, data))

    def outputs(self, eqn: Any, inputs: Sequence[Value], data: Sequence[Any]) -> list[Value]:
        """Wraps data computed from `inputs` as the output values of an equation."""
        deps = union(inputs)
        input_uses = union_of_uses(inputs)
        sources = {value.source for value in inputs if value.source}
        if eqn.primitive.name in SAME_SPACE and len(sources) > 1:
            self.record.neighbours.append({param for source in sources for param in source})
        if eqn.primitive.name == "add":
            for value, other in (inputs, inputs[::-1]):
                if other.from_batch:
                    self.record.add_sum(value.source, value.uses, other.uses)
        is_linear = eqn.primitive.name in LINEAR and len(sources) == 1
        return [
            Value(
                shape=tuple(var.aval.shape),
                dtype=var.aval.dtype,
                data=x,
                deps=deps if jnp.issubdtype(var.aval.dtype, jnp.inexact) else deps & BATCH,
                uses=input_uses if jnp.issubdtype(var.aval.dtype, jnp.inexact) else 0,
                source=min(sources) if is_linear else (),
            )
            for var, x in zip(eqn.outvars, data, strict=True)
        ]

    def _execute(self, eqn: Any, data: list[Any]) -> list[Any]:
        sizes = [math.prod(var.aval.shape) for var in eqn.outvars if hasattr(var.aval, "shape")]
        is_too_large = self.shapes_only and max(sizes, default=0) > HUGE
        needs_mesh = eqn.primitive.name in samples.MESH_OPS
        if is_too_large or needs_mesh or any(isinstance(x, Samples) for x in data):
            return samples.execute(eqn, data, self.rng())
        if (outs := eager.execute(eqn, data)) is not None:
            return outs
        out = eqn.primitive.bind(*data, **eqn.params)
        return list(map(eager.as_numpy, out if eqn.primitive.multiple_results else [out]))

    def note(self, inputs: Sequence[Value], reason: str) -> None:
        """Notes for each parameter among the inputs why this use implies no scale."""
        for view in views_of(inputs):
            self.record.note(view, reason)

    def rng(self) -> np.random.Generator:
        """Returns a new random generator; the sequence is the same in every run."""
        self._n_rngs += 1
        return np.random.default_rng([1, self._n_rngs])

    def normal(self, value: Value, order: Sequence[int], n_batch: int = 0) -> np.ndarray:
        """Draws standard normals in place of a parameter.

        Args:
            value: The parameter, or several joined.
            order: Its axes, contracted ones before free ones. Entries are drawn in this
                order, so that the same model in another memory layout gets the same numbers.
            n_batch: Number of axes at the start of `order` along which numbers repeat, so
                that an ensemble gets the same scales as each of its members.
        """
        shape = tuple(value.shape[i] for i in order)
        members, shape = shape[:n_batch], shape[n_batch:]
        key = (self.record.order(value.views[0]), shape)
        if key not in self._draws:
            self._draws[key] = _balanced_normal(shape, key[0])
        entries = np.broadcast_to(self._draws[key], members + shape)
        return entries.transpose(np.argsort(order)).astype(value.dtype)


def constant(x: Any, aval: Any = None) -> Value:
    """Wraps a constant of the model."""
    if aval is not None:  # A literal, which is a number in Python or an array of JAX's own.
        x = np.asarray(x, aval.dtype)
    return Value(shape=tuple(np.shape(x)), dtype=x.dtype, data=x)


def union(values: Sequence[Value]) -> int:
    """Returns everything these values depend on, as in `Value.deps`."""
    return functools.reduce(operator.or_, (value.deps for value in values), 0)


def union_of_uses(values: Sequence[Value]) -> int:
    """Returns all uses of parameters that these values depend on, as in `Value.uses`."""
    return functools.reduce(operator.or_, (value.uses for value in values), 0)


def views_of(values: Sequence[Value]) -> list[views_lib.View]:
    """Returns the views of all parameters among these values."""
    return [view for value in values for view in value.views]


def with_views(value: Value, views: Sequence[views_lib.View]) -> Value:
    """Returns the value marked as being these parameters."""
    return dataclasses.replace(value, views=tuple(views))


def _read(v: core.Var | core.Literal, env: Mapping[core.Var, Value]) -> Value:
    return constant(v.val, v.aval) if isinstance(v, core.Literal) else env[v]


def _is_var(v: Any) -> TypeGuard[core.Var]:
    return not isinstance(v, core.Literal)


def _balanced_normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draws standard normals whose features come in pairs of opposite sign.

    This removes the noise of the draw from the rms after a ReLU. The pairing depends on the
    seed, so that products of two such results are not biased.
    """
    rng = np.random.default_rng([0, seed])
    n_features = shape[-1] if shape else 1
    half = rng.standard_normal((*shape[:-1], -(-n_features // 2)), np.float32)
    pairs = np.concatenate([half, -half], axis=-1)[..., :n_features]
    order = np.random.default_rng([2, seed]).permutation(n_features)
    return pairs[..., order].reshape(shape)
