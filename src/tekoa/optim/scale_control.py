"""Rules for operations that hold other operations: calls, loops, branches, shards.

A loop is read step by step, so that every slice of stacked layers is met and a recurrent
kernel is seen with the states that it meets. Long loops are read for their first steps.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tekoa.optim import scale_values
from tekoa.optim.scale_reader import Reader, Rule, union
from tekoa.optim.scale_values import Bag, Value

MAX_STEPS = 128  # Of a loop on real data; later ones repeat what the earlier ones gave.
MAX_STEPS_SHAPES_ONLY = 16


def call(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Reads what is called, as if it stood here."""
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))
    return reader.run(body, inputs)


def scan(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Reads the steps of a scan one after the other."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    if _runs_as_it_is(inputs) or length == 0:
        return reader.plain(eqn, inputs)
    # Counted from shapes: what is scanned has one axis more outside than inside.
    n_xs = sum(len(value.shape) > v.aval.ndim for value, v in zip(inputs, body.jaxpr.invars))
    n_ys = sum(a.aval.ndim > b.aval.ndim for a, b in zip(eqn.outvars, body.jaxpr.outvars))
    n_carry = len(eqn.outvars) - n_ys
    n_consts = len(inputs) - n_carry - n_xs
    consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
    xs = inputs[n_consts + n_carry :]
    n_steps = length if any(x.views for x in xs) else min(length, _max_steps(reader))
    rows = []
    for i in range(n_steps):
        index = length - 1 - i if eqn.params["reverse"] else i
        outs = reader.run(body, [*consts, *carry, *(_step(x, index) for x in xs)])
        carry = outs[:n_carry]
        rows.append(outs[n_carry:])
    return [*carry, *(_stack(reader, eqn, column) for column in zip(*rows))]


def while_loop(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Reads the steps of a while loop until its condition fails."""
    if _runs_as_it_is(inputs):
        return reader.plain(eqn, inputs)
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = inputs[:n_cond], inputs[n_cond : n_cond + n_body]
    carry = inputs[n_cond + n_body :]
    for _ in range(_max_steps(reader)):
        (go_on,) = reader.run(eqn.params["cond_jaxpr"], [*cond_consts, *carry])
        if not isinstance(go_on.data, Bag) and not bool(go_on.data):
            break
        carry = reader.run(eqn.params["body_jaxpr"], [*body_consts, *carry])
    return carry


def cond(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Reads every branch, for each may hold parameters; goes on with the one taken."""
    if _runs_as_it_is(inputs):
        return reader.plain(eqn, inputs)
    branches = [reader.run(branch, inputs[1:]) for branch in eqn.params["branches"]]
    taken = len(branches) - 1
    if not isinstance(inputs[0].data, Bag):
        taken = min(max(int(inputs[0].data), 0), taken)
    return [
        dataclasses.replace(column[taken], deps=union([*column, inputs[0]]))
        for column in zip(*branches)
    ]


def shard_map(reader: Reader, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Reads one device's share, on bags: its shapes are not those outside."""
    body = eqn.params["jaxpr"]
    shares = []
    for value, var in zip(inputs, body.invars, strict=True):
        shape = tuple(var.aval.shape)
        views = tuple(view.sharded(shape) for view in value.views)
        data = Bag(scale_values.as_samples(value.data))
        shares.append(dataclasses.replace(value, shape=shape, data=data, views=views))
    outs = reader.run(body, shares)
    return [
        dataclasses.replace(value, shape=tuple(var.aval.shape), views=(), product=None)
        for value, var in zip(outs, eqn.outvars, strict=True)
    ]


def _runs_as_it_is(inputs: Sequence[Value]) -> bool:
    return not any(value.views or isinstance(value.data, Bag) for value in inputs)


def _max_steps(reader: Reader) -> int:
    return MAX_STEPS_SHAPES_ONLY if reader.shapes_only else MAX_STEPS


def _step(value: Value, index: int) -> Value:
    rest = value.shape[1:]
    views = tuple(
        view.sliced((index, *(0 for _ in rest)), (1, *rest)).squeezed((0,)) for view in value.views
    )
    data = value.data if isinstance(value.data, Bag) else value.data[index]
    return dataclasses.replace(value, shape=rest, data=data, views=views, product=None)


def _stack(reader: Reader, eqn: Any, steps: Sequence[Value]) -> Value:
    length = eqn.params["length"]
    if any(isinstance(value.data, Bag) for value in steps):
        data = scale_values.mixed([(v.data, math.prod(v.shape)) for v in steps], reader.rng())
    else:
        arrays = [value.data for value in steps]
        arrays += [arrays[-1]] * (length - len(arrays))
        data = jnp.stack(arrays[::-1] if eqn.params["reverse"] else arrays)
    last, deps = steps[-1], union(steps)
    shape = (length, *last.shape)
    return Value(shape=shape, dtype=last.dtype, data=data, deps=deps, source=last.source)


RULES: dict[str, Rule] = {
    "jit": call,
    "pjit": call,
    "closed_call": call,
    "core_call": call,
    "remat": call,
    "remat2": call,
    "checkpoint": call,
    "custom_jvp_call": call,
    "custom_vjp_call": call,
    "custom_vjp_call_jaxpr": call,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "shard_map": shard_map,
}
