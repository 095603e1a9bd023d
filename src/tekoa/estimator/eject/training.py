"""The training of a model as plain code: initial values, loss, step and loop."""

from typing import Any

import jax

from tekoa.bridges import any_model
from tekoa.core import metrics
from tekoa.core.loss.reduction import split_metrics
from tekoa.core.trees import PyTree
from tekoa.estimator.eject.libraries import Library, library_of
from tekoa.estimator.eject.source import Code
from tekoa.estimator.model_file.experiment import Experiment


def plain_training(experiment: Experiment, batch: Any, code: Code) -> tuple[Library, str]:
    """Returns how the model is run, and the functions that initialise and train it."""
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
    words = code.call(experiment.inputs, "batch", "inputs")
    words = f"*{words}" if isinstance(sample, tuple) else words
    library = library_of(experiment.model, inputs, words, has_variables=bool(variables))
    loss = code.call(experiment.loss, f"{'*' * has_several}outputs, batch", "loss")
    return library, _training(
        library,
        loss=loss + "[0]" * has_metrics,
        has_variables=bool(variables),
        is_mean=is_mean,
    )


def _training(library: Library, *, loss: str, has_variables: bool, is_mean: bool) -> str:
    """Returns the functions `init`, `loss_of`, `train_step` and `train`."""
    variables = ", variables" if has_variables else ""
    key = ", key" if library.uses_key else ""
    extras = ["count"] * is_mean + ["variables"] * has_variables
    extra = f"({', '.join(extras)})" if len(extras) > 1 else "".join(extras)
    value_lines = f"return {loss}" + f", {extra}" * bool(extras)
    if is_mean:
        value_lines = f"total, count = {loss}\n    return total, {extra}"
    result = f"(loss, {extra}), grads" if extras else "loss, grads"
    aux = ", has_aux=True" if extras else ""
    divide = "\n    loss, grads = jax.tree.map(lambda x: x / count, (loss, grads))" * is_mean
    fold = "\n    key = jax.random.fold_in(ROOT_KEY, step)" * library.uses_key
    what = "parameters and variables" if has_variables else "parameters"
    steps = f'''
INIT_KEY, ROOT_KEY = jax.random.split(jax.random.key(SEED))


def init(key, batch):
    """Returns the initial {what}."""
    {library.init}


def loss_of(params{variables}, batch{key}):
    """Returns the loss of a batch{"" if not extras else ", and " + " and ".join(extras)}."""
    {library.forward}
    {value_lines}


@functools.partial(jax.jit, static_argnames="reports")
def train_step(state, batch, step, reports):
    """Returns the state after a step, the loss before it, and norms if they are reported."""
    params{variables}, opt_state = state{fold}
    {result} = jax.value_and_grad(loss_of{aux})(params{variables}, batch{key}){divide}
    is_good = jnp.isfinite(loss) & are_finite(grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    new_state, norms = (params{variables}, opt_state), ()
    if reports:  # As in the run before a checkpoint.
        is_good &= are_finite(params)
        norms = optax.global_norm(grads), optax.global_norm(params)
        new_state = jax.lax.cond(is_good, lambda: new_state, lambda: state)
    return new_state, loss, is_good, norms
'''
    return f"{steps}\n\n{_loop(variables)}"


def _loop(variables: str) -> str:
    """Returns the function `train`."""
    return f'''
def train(n_steps=N_STEPS):
    """Trains, and returns the parameters and the loss of every step."""
    params{variables} = init(INIT_KEY, batch_of(0))
    state, losses = (params{variables}, tx.init(params)), []
    for step in range(n_steps):
        reports = (step + 1) % PRINT_EVERY == 0
        state, loss, is_good, norms = train_step(state, batch_of(step), step, reports)
        losses.append(float(loss))
        if not is_good:
            raise FloatingPointError(f"NaN or Inf in step {{step + 1}}.")
        if reports:
            print(f"step {{step + 1}}: loss {{loss:.6g}}, norms {{norms[0]:.4g}} {{norms[1]:.4g}}")
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
