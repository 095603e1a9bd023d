"""Low-rank adapters in the long form, by `--lora_rank`.

The states of a model file then hold adapters as their `params` and the full weights beside them.
`state.variables()` and `state.value_and_grad_apply_fn` run the model with both together.
"""

from typing import Any, TypeVar

import jax

from tekoa.bridges import lora
from tekoa.core.model import ModelFns
from tekoa.core.trees import PyTree
from tekoa.estimator.cli.flags import RunConfig
from tekoa.estimator.jestimator import states
from tekoa.estimator.model_file.lora import adapted_by_flags

State = TypeVar("State", states.TrainState, states.InferState)


def adapters_of(config: RunConfig, params: PyTree) -> ModelFns | None:
    """Returns the adapters that the flags request, or None without `--lora_rank`.

    Args:
        config: The flags.
        params: The parameters of the model file, or their shapes.

    Returns:
        Functions of a model whose only input is the parameters; see `tekoa.lora`.

    Raises:
        UsageError: If the parameters cannot be adapted this way.
    """
    model = ModelFns(init=lambda rng, inputs: (inputs[0], {}), apply=_run_nothing)
    adapted = adapted_by_flags(model, config, (params,))
    return None if adapted is model else adapted


def adapt(adapters: ModelFns | None, state: State, rng: jax.Array) -> State:
    """Returns the state with new adapters as its parameters."""
    if adapters is None:
        return state
    params, variables = adapters.init(rng, (state.params,))
    return state.replace(params=params, _frozen=variables[lora.FROZEN], _merge=adapters.merge)


def _run_nothing(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("The steps of the model file run the model.")
