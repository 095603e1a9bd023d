"""Low-rank adapters by the settings of a model: `--module_config.lora.rank=4`."""

import logging
from typing import Any

import jax
from ml_collections import config_dict

from tekoa.bridges import lora
from tekoa.core import trees
from tekoa.estimator.config import UsageError
from tekoa.store import errors, loading

_log = logging.getLogger("tekoa")


def settings() -> dict[str, Any]:
    """What belongs into the config of a model that can be adapted, under the name `lora`.

    A `rank` of 0 adapts nothing; `where` is a pattern over the names of weights, `base` a
    checkpoint with the trained ones; see `tekoa.lora`.
    """
    return {
        "rank": 0,
        "where": config_dict.placeholder(str),
        "alpha": config_dict.placeholder(float),
        "base": config_dict.placeholder(str),
    }


def adapted(model: Any, config: Any, inputs: Any) -> Any:
    """Gives the model as it is, or with adapters if its config asks for them.

    Args:
        model: All that `tekoa.lora` takes.
        config: The model's config; may have what `settings` gives as `lora`.
        inputs: Sample inputs, or a tuple of them.

    Raises:
        UsageError: If the model cannot be adapted so, or there is no such base.
    """
    config = getattr(config, "lora", None)
    if config is None or not config.rank:
        return model
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        fns = lora.lora(
            model, config.rank, where=config.where, alpha=config.alpha, base=_base(config.base)
        )
        params, variables = jax.eval_shape(fns.init, jax.random.key(0), inputs)
    except (ValueError, errors.StoreError) as error:
        raise UsageError(f"--module_config.lora: {error}") from None
    _log.info(
        "Adapters of rank %d: %d numbers are learned over %d that stay as they are%s.",
        config.rank,
        trees.n_elements(params),
        trees.n_elements(variables[lora.FROZEN]),
        "" if config.base else "; these are untrained, --module_config.lora.base=PATH names others",
    )
    return fns


def _base(path: str | None) -> Any:
    """The trained parameters of a checkpoint: their average, where there is one."""
    if path is None:
        return None
    found = loading.load(path, items=["average", "model_params"])
    return found.get("average") or found["model_params"]
