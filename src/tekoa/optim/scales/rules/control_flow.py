"""Rules for operations that contain other operations: calls, loops, branches, shards.

A loop is interpreted step by step, so that every slice of stacked layers is used and a
recurrent kernel is used with its actual states. Long loops stop after their first steps.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tekoa.optim.scales import values
from tekoa.optim.scales.interpreter import Reader, Rule, union, union_of_uses
from tekoa.optim.scales.values import Samples, Value

MAX_STEPS = 128  # Of a loop on real data; later steps use parameters like the earlier ones.
MAX_STEPS_SHAPES_ONLY = 16


def call(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Interprets the body of a call as if it were inlined."""
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))
    return reader.run(body, inputs)


def scan(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Interprets the steps of a scan one by one."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    if _is_plain(inputs) or length == 0:
        return reader.plain(eqn, inputs)
    # Counted from shapes: scanned arrays have one axis more outside than inside.
    n_xs = sum(len(value.shape) > v.aval.ndim for value, v in zip(inputs, body.jaxpr.invars))
    n_ys = sum(a.aval.ndim > b.aval.ndim for a, b in zip(eqn.outvars, body.jaxpr.outvars))
    n_carry = len(eqn.outvars) - n_ys
    n_consts = len(inputs) - n_carry - n_xs
    consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
    xs = inputs[n_consts + n_carry :]
    n_steps = length if any(x.views for x in xs) else min(length, _max_steps(reader))
    ys = []
    for i in range(n_steps):
        index = length - 1 - i if eqn.params["reverse"] else i
        step_inputs = [*consts, *carry, *(_slice_step(x, index) for x in xs)]
        outs = [reader.settle(value) for value in reader.run(body, step_inputs)]
        carry = outs[:n_carry]
        ys.append(outs[n_carry:])
    return [*carry, *(_stack_steps(reader, eqn, steps) for steps in zip(*ys))]


def while_loop(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Interprets the steps of a while loop until its condition fails."""
    if _is_plain(inputs):
        return reader.plain(eqn, inputs)
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = inputs[:n_cond], inputs[n_cond : n_cond + n_body]
    carry = inputs[n_cond + n_body :]
    for _ in range(_max_steps(reader)):
        (condition,) = reader.run(eqn.params["cond_jaxpr"], [*cond_consts, *carry])
        if not isinstance(condition.data, Samples) and not bool(condition.data):
            break
        carry = reader.run(eqn.params["body_jaxpr"], [*body_consts, *carry])
    return carry


def cond(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Interprets all branches, as any may use parameters; returns the selected one."""
    if _is_plain(inputs):
        return reader.plain(eqn, inputs)
    branches = [reader.run(branch, inputs[1:]) for branch in eqn.params["branches"]]
    selected = len(branches) - 1
    if not isinstance(inputs[0].data, Samples):
        selected = min(max(int(inputs[0].data), 0), selected)
    return [
        dataclasses.replace(
            outs[selected], deps=union([*outs, inputs[0]]), uses=union_of_uses(outs)
        )
        for outs in zip(*branches)
    ]


def shard_map(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Interprets the shard of one device, on samples, as shapes differ from those outside."""
    body = eqn.params["jaxpr"]
    shards = []
    for value, var in zip(inputs, body.invars, strict=True):
        shape = tuple(var.aval.shape)
        views = tuple(view.sharded(shape) for view in value.views)
        data = Samples(values.as_samples(value.data))
        shards.append(dataclasses.replace(value, shape=shape, data=data, views=views))
    outs = reader.run(body, shards)
    return [
        dataclasses.replace(value, shape=tuple(var.aval.shape), views=(), product=None)
        for value, var in zip(outs, eqn.outvars, strict=True)
    ]


def _is_plain(inputs: Sequence[Value]) -> bool:
    """Whether JAX can run the operation itself: no parameters, and real arrays only."""
    return not any(value.views or isinstance(value.data, Samples) for value in inputs)


def _max_steps(reader: Reader) -> int:
    return MAX_STEPS_SHAPES_ONLY if reader.shapes_only else MAX_STEPS


def _slice_step(value: Value, index: int) -> Value:
    rest = value.shape[1:]
    views = tuple(
        view.sliced((index, *(0 for _ in rest)), (1, *rest)).squeezed((0,)) for view in value.views
    )
    data = value.data if isinstance(value.data, Samples) else value.data[index]
    return dataclasses.replace(value, shape=rest, data=data, views=views, product=None)


def _stack_steps(reader: Reader, eqn: Any, steps: Sequence[Value]) -> Value:
    """Stacks the outputs of the steps; the last one stands for steps that were not run."""
    length = eqn.params["length"]
    if any(isinstance(value.data, Samples) for value in steps):
        data = values.mix([(v.data, math.prod(v.shape)) for v in steps], reader.rng())
    else:
        arrays = [value.data for value in steps]
        arrays += [arrays[-1]] * (length - len(arrays))
        arrays = arrays[::-1] if eqn.params["reverse"] else arrays
        # JAX would compile a program of as many operations.
        is_numpy = all(isinstance(array, np.ndarray) for array in arrays)
        data = np.stack(arrays) if is_numpy else jnp.stack(arrays)
    last = steps[-1]
    return Value(
        shape=(length, *last.shape),
        dtype=last.dtype,
        data=data,
        deps=union(steps),
        uses=union_of_uses(steps),
        source=last.source,
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(["jit", "pjit", "closed_call", "core_call"], call),
    **dict.fromkeys(["remat", "remat2", "checkpoint"], call),
    **dict.fromkeys(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"], call),
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "shard_map": shard_map,
}
