"""The training of a model as plain code: initial values, loss, step and loop."""

import contextlib
import dataclasses
import inspect
from typing import Any

import jax

from tekoa.bridges import any_model
from tekoa.core import metrics
from tekoa.core.loss.reduction import split_metrics
from tekoa.core.trees import PyTree
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file.experiment import Experiment

_MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """How a model of one library is run.

    Attributes:
        imports: The line that imports what the code below needs; "" for none.
        before: Lines after the model.
        init: The lines of a function of `key` and `batch` that returns the initial parameters
            and, if there are any, variables.
        forward: Lines that compute `outputs` and, if there are any, new `variables`.
        uses_key: Whether `forward` uses `key`.
    """

    imports: str = ""
    before: str = ""
    init: str
    forward: str
    uses_key: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainProgram:
    """The parts of an ejected file that depend on what a step of the model does.

    Attributes:
        library: How the model is run.
        code: The functions that initialise and train.
    """

    library: Library
    code: str


def plain_program(
    experiment: Experiment, batch: Any, *, drops_metrics: bool, drops_boxes: bool
) -> PlainProgram:
    """Returns the code that trains a model.

    Args:
        experiment: The model, its loss and its optimizer.
        batch: A batch.
        drops_metrics: Whether the loss of the ejected file returns no metrics.
        drops_boxes: Whether its parameters have no logical axes.

    Raises:
        UsageError: If the model is of an unknown kind.
    """
    sample = experiment.inputs(batch)
    inputs = sample if isinstance(sample, tuple) else (sample,)
    fns, key = any_model.as_model_fns(experiment.model), jax.random.key(0)
    params, variables = jax.eval_shape(fns.init, key, inputs)
    is_mean = has_metrics = has_several = False

    def value(params: PyTree, variables: PyTree) -> Any:
        nonlocal is_mean, has_metrics, has_several
        outputs, _ = fns.apply(params, variables, inputs, rng=key, train=True)
        has_several = isinstance(outputs, tuple)
        result, others = split_metrics(
            experiment.loss(*(outputs if has_several else (outputs,)), batch)
        )
        is_mean, has_metrics = isinstance(result, metrics.Mean), bool(others)
        return result

    jax.eval_shape(value, params, variables)
    words = "*inputs(batch)" if isinstance(sample, tuple) else "inputs(batch)"
    library = _library(experiment.model, inputs, words, bool(variables), drops_boxes)
    return PlainProgram(
        library=library,
        code=_training(
            library,
            outputs="*outputs" if has_several else "outputs",
            has_variables=bool(variables),
            is_mean=is_mean,
            has_metrics=has_metrics and not drops_metrics,
        ),
    )


def own_params(experiment: Experiment, batch: Any) -> PyTree:
    """Returns the shapes of the parameters in the order of their library."""
    model = experiment.model
    module = model[0] if isinstance(model, tuple) else model
    if "equinox" in _bases(module):  # Of which the order is not that of the names.
        import equinox as eqx

        return jax.eval_shape(lambda: eqx.filter(module, eqx.is_inexact_array))
    inputs, _ = experiment.split(batch)
    fns = any_model.as_model_fns(model)
    return jax.eval_shape(fns.init, jax.random.key(0), inputs)[0]


def _bases(model: Any) -> str:
    return " ".join(base.__module__ for base in type(model).__mro__)


def _library(
    model: Any, inputs: tuple[Any, ...], words: str, has_variables: bool, drops_boxes: bool
) -> Library:
    module = model[0] if isinstance(model, tuple) and len(model) == 2 else model
    bases, kind = _bases(module), type(model).__name__
    if "flax.linen" in bases:
        return _linen(model, inputs, words, has_variables, drops_boxes)
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
        return Library(
            init=f"return model.init(key, {as_tuple}){'' if has_variables else '[0]'}",
            forward=f"outputs{changed} = model.apply("
            f"params, {'variables' if has_variables else '{}'}, {as_tuple}, rng=key, train=True"
            f"){merged}",
        )
    raise UsageError(
        f"A model of type {kind} cannot be ejected: only modules of Linen, NNX, Equinox and Haiku, "
        "and ModelFns."
    )


def _linen(
    model: Any, inputs: tuple[Any, ...], words: str, has_variables: bool, drops_boxes: bool
) -> Library:
    arguments = inspect.signature(type(model).__call__).parameters
    modes = {n: v for n, v in _MODES.items() if n in arguments and getattr(model, n, None) is None}
    on = "".join(f", {name}={value}" for name, value in modes.items())
    off = "".join(f", {name}={not value}" for name, value in modes.items())
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
    boxes = not drops_boxes and any(map(is_box, jax.tree.leaves(shapes, is_leaf=is_box)))
    call = f"model.init(keys, *inputs{off})"
    call = f"nn.meta.unbox({call})" if boxes else call
    call = f"lambda keys, *inputs: {call}" if boxes or off else "model.init"
    dropout = ', "dropout": jax.random.fold_in(key, 1)' if init_uses_key else ""
    returned = 'variables.pop("params"), variables' if has_variables else 'variables["params"]'
    drop = '\n    variables.pop("intermediates")' if "intermediates" in shapes else ""
    rngs = ', rngs={"dropout": jax.random.fold_in(key, 0)}' if uses_key else ""
    collections = '{"params": params, **variables}' if has_variables else '{"params": params}'
    mutable = ", mutable=[*variables]" if has_variables else ""
    result = "outputs, variables" if has_variables else "outputs"
    return Library(
        imports="from flax import linen as nn" if boxes else "",
        init=f"""keys = {{"params": jax.random.fold_in(key, 0){dropout}}}
    variables = jax.jit({call})(keys, {words}){drop}
    return {returned}""",
        forward=f"{result} = model.apply({collections}, {words}{rngs}{mutable}{on})",
        uses_key=uses_key,
    )


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
        init="return PARAMS, VARIABLES" if has_variables else "return PARAMS",
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
        init="return PARAMS, initial" if has_state else "return PARAMS",
        forward=f"live = eqx.combine(params, STATIC)\n    {result} = jax.vmap("
        f'lambda {arguments[0]}: {call}, axis_name="batch"{axes})({arguments[1]})',
        uses_key=takes_key,
    )


def _haiku(words: str, *, has_state: bool) -> Library:
    result = "outputs, variables" if has_state else "outputs"
    state = ", variables" if has_state else ""
    return Library(
        init=f"return model.init(key, {words})",
        forward=f"{result} = model.apply(params{state}, key, {words})",
    )


def _training(
    library: Library, *, outputs: str, has_variables: bool, is_mean: bool, has_metrics: bool
) -> str:
    """Returns the functions `init`, `loss_of`, `train_step` and `train`."""
    variables = ", variables" if has_variables else ""
    key = ", key" if library.uses_key else ""
    extras = ["count"] * is_mean + ["variables"] * has_variables
    extra = f"({', '.join(extras)})" if len(extras) > 1 else "".join(extras)
    value = f"loss({outputs}, batch)" + "[0]" * has_metrics
    if is_mean:
        value_lines = f"total, count = {value}\n    return total, {extra}"
    else:
        value_lines = f"return {value}" + f", {extra}" * bool(extras)
    result = f"(value, {extra}), grads" if extras else "value, grads"
    aux = ", has_aux=True" if extras else ""
    divide = (
        "\n    value, grads = value / count, jax.tree.map(lambda g: g / count, grads)" * is_mean
    )
    fold = "\n    key = jax.random.fold_in(ROOT_KEY, step)" * library.uses_key
    what = "parameters and variables" if has_variables else "parameters"
    return f'''
INIT_KEY, ROOT_KEY = jax.random.split(jax.random.key(SEED))


def init(key, batch):
    """Returns the initial {what}."""
    {library.init}


def loss_of(params{variables}, batch{key}):
    """Returns the loss of a batch{"" if not extras else ", and " + " and ".join(extras)}."""
    {library.forward}
    {value_lines}


{ARE_FINITE}

@functools.partial(jax.jit, static_argnames="reports")
def train_step(state, batch, step, reports):
    """Returns the state after a step, the loss before it, and norms if they are reported."""
    params{variables}, opt_state = state{fold}
    value_and_grad = jax.value_and_grad(loss_of{aux})
    {result} = value_and_grad(params{variables}, batch{key}){divide}
    is_good = jnp.isfinite(value) & are_finite(grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    params, norms = optax.apply_updates(params, updates), ()
    new_state = params{variables}, opt_state
    if reports:  # As in the run before a checkpoint.
        is_good, norms = is_good & are_finite(params), (norm(grads), norm(params))
        new_state = jax.lax.cond(is_good, lambda: new_state, lambda: state)
    return new_state, value, is_good, norms


def train(n_steps=N_STEPS):
    """Trains, and returns the parameters and the loss of every step."""
    params{variables} = init(INIT_KEY, batch_of(0))
    state, losses = (params{variables}, tx.init(params)), []
    for step in range(n_steps):
        reports = (step + 1) % PRINT_EVERY == 0
        state, loss, is_good, norms = train_step(state, batch_of(step), step, reports)
{LOOP}'''


ARE_FINITE = '''def are_finite(tree):
    """Whether arrays have no NaN or Inf; matrix products are the fastest way on CPU."""
    leaves = jax.tree.leaves(tree)
    rows = [x @ jnp.full(x.shape[-1], 0.5 / x.shape[-1]) if x.ndim > 1 else x for x in leaves]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(row)) for row in rows]))


def norm(tree):
    """Returns the norm of all arrays together."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))

'''

LOOP = """        losses.append(float(loss))
        if not is_good:
            raise FloatingPointError(f"NaN or Inf in step {step + 1}.")
        if reports:
            print(f"step {step + 1}: loss {loss:.6g}, norms {norms[0]:.4g} {norms[1]:.4g}")
    return state[0], losses


if __name__ == "__main__":
    train()
"""
