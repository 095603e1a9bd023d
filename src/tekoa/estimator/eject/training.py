"""The training of a model as plain code: loss, step and loop."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from tekoa.bridges import any_model
from tekoa.core import metrics
from tekoa.core.loss import cross_entropy
from tekoa.core.loss.reduction import split_metrics
from tekoa.core.trees import PyTree
from tekoa.estimator.eject import text as texts
from tekoa.estimator.eject.libraries import Library, library_of
from tekoa.estimator.eject.ran import Lines, recorded_lines
from tekoa.estimator.eject.source import Code
from tekoa.estimator.model_file.experiment import Experiment


@dataclasses.dataclass(kw_only=True)
class Trace:
    """What is seen when the loss of a batch is traced.

    Attributes:
        inputs: The inputs of the model.
        has_inputs: Whether they are a tuple.
        has_variables: Whether the model has variables besides its parameters.
        has_outputs: Whether its outputs are several.
        is_mean: Whether the loss is a total and a count.
        has_metrics: Whether it comes with metrics.
        ran: The lines that ran, by file.
    """

    inputs: tuple[Any, ...]
    has_inputs: bool
    has_variables: bool = False
    has_outputs: bool = False
    is_mean: bool = False
    has_metrics: bool = False
    ran: Mapping[str, Lines] = dataclasses.field(default_factory=dict)


def trace(experiment: Experiment, batch: Any, folder: pathlib.Path) -> Trace:
    """Traces the initialisation and the loss; `folder` is that of the model file."""
    sample = experiment.inputs(batch)
    is_tuple = isinstance(sample, tuple)
    seen = Trace(inputs=sample if is_tuple else (sample,), has_inputs=is_tuple)
    fns, key = any_model.as_model_fns(experiment.model), jax.random.key(0)

    def value(params: PyTree, variables: PyTree) -> Any:
        inputs = experiment.inputs(batch)
        inputs = inputs if is_tuple else (inputs,)
        outputs, _ = fns.apply(params, variables, inputs, rng=key, train=True)
        seen.has_outputs = isinstance(outputs, tuple)
        result, others = split_metrics(
            experiment.loss(*(outputs if seen.has_outputs else (outputs,)), batch)
        )
        seen.is_mean, seen.has_metrics = isinstance(result, metrics.Mean), bool(others)
        return result[0] if seen.is_mean else result

    def is_own(path: str) -> bool:
        return pathlib.Path(path).parent == folder or path == cross_entropy.__file__

    jax.clear_caches()  # Functions that are known to JAX would not run.
    with recorded_lines(is_own) as seen.ran:
        params, variables = jax.eval_shape(fns.init, key, seen.inputs)
        jax.eval_shape(jax.grad(value), params, variables)
    seen.has_variables = bool(variables)
    return seen


def plain_training(
    experiment: Experiment, seen: Trace, code: Code, clip_norm: float | None = None
) -> tuple[Library, str]:
    """Returns how the model is run, and the functions that train it."""
    words = code.call(experiment.inputs, "batch", "inputs")
    words = f"*{words}" if seen.has_inputs else words
    library = library_of(experiment.model, seen.inputs, words, has_variables=seen.has_variables)
    loss = code.call(experiment.loss, f"{'*' * seen.has_outputs}outputs, batch", "loss")
    return library, _training(library, loss + "[0]" * seen.has_metrics, seen, clip_norm)


_INDENT = "\n    "


def _training(library: Library, loss: str, seen: Trace, clip_norm: float | None) -> str:
    """Returns the functions `loss_of`, `train_step` and `train`."""
    variables = ", variables" if seen.has_variables else ""
    key = ", key" if library.uses_key else ""
    extras = ["count"] * seen.is_mean + ["variables"] * seen.has_variables
    extra = f"({', '.join(extras)})" if len(extras) > 1 else "".join(extras)
    lines = [library.forward]
    if seen.is_mean and variables:
        lines += [f"total, count = {loss}", f"return total, {extra}"]
    else:
        lines += [f"return {loss}{variables}"]
    result = f"(loss, {extra}), grads" if extras else "loss, grads"
    function = f"jax.value_and_grad(loss_of{', has_aux=True' if extras else ''})"
    arguments = f"(params{variables}, batch{key})"
    calls = [f"{result} = {function}{arguments}"]
    if len(calls[0]) > texts.WIDTH - 4:
        calls = [f"value_and_grad = {function}", f"{result} = value_and_grad{arguments}"]
    step = [f"params{variables}, opt_state = state", *calls]
    if seen.is_mean:
        step += ["loss, grads = jax.tree.map(lambda x: x / count, (loss, grads))"]
    shaped = "grads"
    if clip_norm is not None:
        shaped = "jax.tree.map(lambda g: g * scale, grads)"
        limit = f"{clip_norm!r} / jnp.maximum(optax.global_norm(grads), 1e-30)"
        step += [f"scale = jnp.minimum(1.0, {limit})"]
    init = library.init.replace("batch", "batch_of(0)")
    fold = "jax.random.fold_in(root_key, step)"
    return f'''
def loss_of(params{variables}, batch{key}):
    """Returns the loss of a batch{" and " * bool(extras) + " and ".join(extras)}."""
    {_INDENT.join(lines)}


@functools.partial(jax.jit, static_argnames="reports")
def train_step(state, batch{key}, reports):
    """Returns the state after a step, the loss before it, and norms if they are reported."""
    {_INDENT.join(step)}
    updates, opt_state = tx.update({shaped}, opt_state, params)
    params = optax.apply_updates(params, updates)
    norms = (optax.global_norm(grads), optax.global_norm(params)) if reports else ()
    return (params{variables}, opt_state), loss, are_finite(grads) & jnp.isfinite(loss), norms


def train(n_steps=N_STEPS):
    """Trains, and returns the parameters and the loss of every step."""
    init_key, root_key = jax.random.split(jax.random.key(SEED))
    {init}
    state, losses = (params{variables}, tx.init(params)), []
    for step in range(n_steps):
        {f"key, reports = {fold}, " if key else "reports = "}(step + 1) % PRINT_EVERY == 0
        state, loss, is_good, norms = train_step(state, batch_of(step){key}, reports)
        assert is_good, f"NaN or Inf in step {{step + 1}}."
        losses.append(float(loss))
        if reports:
            print(f"step {{step + 1}}: loss {{loss:.6g}}, norms", *map(float, norms))
    return state[0], losses


if __name__ == "__main__":
    train()
'''


def long_training(*, changes_optimizer: bool) -> str:
    """Returns the loop of a model file in the long form."""
    replace = "\n    state = state.replace(tx=tx, opt_state=tx.init(state.params))"
    return f'''
def train(n_steps=N_STEPS):
    """Trains, and returns the parameters and the first metric of every step."""
    state = get_train_state(CONFIG, jax.random.key(SEED)){replace * changes_optimizer}
    empty = state.metrics_mod.init(jax.random.key(0))
    run_step = jax.jit(functools.partial(train_step, CONFIG))
    losses = []
    for step in range(n_steps):
        state, metrics = run_step(batch_of(step), state, empty)
        loss = next(iter(state.metrics_mod.apply(metrics).values()))
        losses.append(float(loss))
        if (step + 1) % PRINT_EVERY == 0:
            print(f"step {{step + 1}}: {{losses[-1]:.6g}}", flush=True)
    return state.params, losses


if __name__ == "__main__":
    train()
'''
