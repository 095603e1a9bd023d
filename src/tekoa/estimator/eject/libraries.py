"""How a model of each library is created and run in plain code."""

import contextlib
import dataclasses
import inspect
from typing import Any

import jax

from tekoa.bridges import any_model
from tekoa.core.trees import PyTree
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import text as texts
from tekoa.estimator.model_file.experiment import Experiment

_MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """How a model of one library is run.

    Attributes:
        imports: The line that imports what the code below needs; "" for none.
        before: Lines after the model.
        init: Lines that compute the initial `params` and, if there are any, `variables` from
            `init_key` and `batch`.
        forward: Lines that compute `outputs` and, if there are any, new `variables`.
        uses_key: Whether `forward` uses `key`.
    """

    imports: str = ""
    before: str = ""
    init: str
    forward: str
    uses_key: bool = True


def own_params(experiment: Experiment, batch: Any) -> PyTree:
    """Returns the shapes of the parameters in the order of their library."""
    model = experiment.model
    module = model[0] if isinstance(model, tuple) else model
    if "equinox" in _bases(module):  # Of which the order is not that of the names.
        import equinox as eqx

        return jax.eval_shape(lambda: eqx.filter(module, eqx.is_inexact_array))
    if "flax.nnx" in _bases(module):  # Which adds its own leaves to the names.
        from flax import nnx

        return jax.eval_shape(lambda: nnx.split(module, nnx.Param, ...)[1])
    inputs, _ = experiment.split(batch)
    fns = any_model.as_model_fns(model)
    return jax.eval_shape(fns.init, jax.random.key(0), inputs)[0]


def _bases(model: Any) -> str:
    return " ".join(base.__module__ for base in type(model).__mro__)


def library_of(model: Any, inputs: tuple[Any, ...], words: str, *, has_variables: bool) -> Library:
    """Returns how a model is run.

    Args:
        model: The model.
        inputs: Sample inputs.
        words: The code of its inputs, with a star before a tuple.
        has_variables: Whether it has variables besides its parameters.

    Raises:
        UsageError: If it is of an unknown kind.
    """
    module = model[0] if isinstance(model, tuple) and len(model) == 2 else model
    bases, kind = _bases(module), type(model).__name__
    if "flax.linen" in bases:
        return _linen(model, inputs, words, has_variables)
    if "flax.nnx" in bases:
        return _nnx(words, has_variables)
    if "equinox" in bases:
        takes_key = "key" in inspect.signature(type(module).__call__).parameters
        return _equinox(words, takes_key=takes_key, has_state=module is not model)
    if kind in ("Transformed", "TransformedWithState"):
        return _haiku(words, has_state=kind == "TransformedWithState")
    if kind == "ModelFns":
        as_tuple = words.removeprefix("*") if words.startswith("*") else f"({words},)"
        changed = ", changed" if has_variables else ", _"
        merged = "\n    variables = {**variables, **changed}" * has_variables
        initial = "variables" if has_variables else "_"
        return Library(
            init=f"params, {initial} = model.init(init_key, {as_tuple})",
            forward=f"outputs{changed} = model.apply("
            f"params, {'variables' if has_variables else '{}'}, {as_tuple}, rng=key, train=True"
            f"){merged}",
        )
    raise UsageError(
        f"A model of type {kind} cannot be ejected: only modules of Linen, NNX, Equinox and Haiku, "
        "and ModelFns."
    )


def _linen(model: Any, inputs: tuple[Any, ...], words: str, has_variables: bool) -> Library:
    arguments = inspect.signature(type(model).__call__).parameters
    modes = {n: v for n, v in _MODES.items() if n in arguments and getattr(model, n, None) is None}
    on = "".join(f", {name}={value}" for name, value in modes.items())
    others = {n: v for n, v in modes.items() if arguments[n].default is not (not v)}
    off = "".join(f", {name}={not value}" for name, value in others.items())
    key = jax.random.key(0)

    def init(rngs: Any) -> Any:
        return model.init(rngs, *inputs, **{n: not v for n, v in modes.items()})

    def apply(variables: PyTree) -> Any:
        return model.apply(variables, *inputs, mutable=True, **modes)

    shapes = jax.eval_shape(init, {"params": key, "dropout": key})
    uses_key = init_uses_key = True
    with contextlib.suppress(Exception):
        jax.eval_shape(apply, shapes)
        uses_key = False
    with contextlib.suppress(Exception):
        jax.eval_shape(init, {"params": key})
        init_uses_key = False
    from flax.core import meta

    is_box = lambda x: isinstance(x, meta.AxisMetadata)  # noqa: E731
    boxes = any(map(is_box, jax.tree.leaves(shapes, is_leaf=is_box)))
    dropout = ', "dropout": jax.random.fold_in(init_key, 1)' if init_uses_key else ""
    init_code = f"functools.partial(model.init{off})" if off else "model.init"
    init_lines = [
        f'keys = {{"params": jax.random.fold_in(init_key, 0){dropout}}}',
        f"variables = jax.jit({init_code})(keys, {words})",
    ]
    variables = "nn.meta.unbox(variables)" if boxes else "variables"
    if has_variables:
        init_lines += [f"variables = {variables}"] * boxes
        init_lines += ['variables.pop("intermediates")'] * ("intermediates" in shapes)
        init_lines += ['params = variables.pop("params")']
    else:
        init_lines += [f'params = {variables}["params"]']
    rngs = ['rngs={"dropout": jax.random.fold_in(key, 0)}'] if uses_key else []
    collections = '{"params": params, **variables}' if has_variables else '{"params": params}'
    mutable = ", mutable=[*variables]" if has_variables else ""
    result = "outputs, variables" if has_variables else "outputs"
    return Library(
        imports="from flax import linen as nn" if boxes else "",
        init="\n    ".join(init_lines),
        forward=_call(f"{result} = model.apply", f"{collections}, {words}{on}{mutable}", *rngs),
        uses_key=uses_key,
    )


def _call(function: str, *arguments: str) -> str:
    """Returns a call in the body of a function: on one line, or arguments on lines of their own."""
    line = f"{function}({', '.join(arguments)})"
    rows = "".join(f"        {row},\n" for row in arguments)
    return line if len(line) <= texts.WIDTH - 4 else f"{function}(\n{rows}    )"


def _nnx(words: str, has_variables: bool) -> Library:
    rest = "VARIABLES" if has_variables else "_"
    merge = "nnx.merge(GRAPH, params)"
    after = ""
    if has_variables:
        # A copy: a module changes its variables.
        merge = "nnx.merge(GRAPH, params, jax.tree.map(lambda x: x, variables))"
        after = "\n    _, _, variables = nnx.split(live, nnx.Param, ...)"
    return Library(
        imports="from flax import nnx",
        before=f"model.train()\nGRAPH, PARAMS, {rest} = nnx.split(model, nnx.Param, ...)",
        init="params, variables = PARAMS, VARIABLES" if has_variables else "params = PARAMS",
        forward=f"live = {merge}\n    outputs = live({words}){after}",
        uses_key=False,
    )


def _equinox(words: str, *, takes_key: bool, has_state: bool) -> Library:
    module = "model"
    before = ""
    if has_state:
        module, before = "module", "module, initial = model\n"
    before += (
        f"PARAMS, STATIC = eqx.partition(eqx.nn.inference_mode({module}, False), "
        "eqx.is_inexact_array)"
    )
    as_tuple = words.removeprefix("*") if words.startswith("*") else f"({words},)"
    keys = "jax.random.split(key, BATCH_SIZE)"
    call = "live(*xs" + ", variables" * has_state + ", key=key" * takes_key + ")"
    arguments = ("xs, key", f"{as_tuple}, {keys}") if takes_key else ("xs", as_tuple)
    axes = ", out_axes=(0, None)" if has_state else ""
    result = "outputs, variables" if has_state else "outputs"
    return Library(
        imports="import equinox as eqx",
        before=before,
        init="params, variables = PARAMS, initial" if has_state else "params = PARAMS",
        forward=f"live = eqx.combine(params, STATIC)\n    {result} = jax.vmap("
        f'lambda {arguments[0]}: {call}, axis_name="batch"{axes})({arguments[1]})',
        uses_key=takes_key,
    )


def _haiku(words: str, *, has_state: bool) -> Library:
    result = "outputs, variables" if has_state else "outputs"
    state = ", variables" if has_state else ""
    return Library(
        init=f"params{state} = model.init(init_key, {words})",
        forward=f"{result} = model.apply(params{state}, key, {words})",
    )
