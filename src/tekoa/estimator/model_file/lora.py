"""Low-rank adapters from the settings of a model: `--module_config.lora.rank=4`."""

import logging
from typing import Any

import jax
from ml_collections import config_dict

from tekoa.bridges import lora
from tekoa.core import trees
from tekoa.estimator.cli.flags import UsageError
from tekoa.store import errors
from tekoa.store.read import load

_log = logging.getLogger("tekoa")


def settings() -> dict[str, Any]:
    """Returns the settings for the entry `lora` in the config of a model.

    A `rank` of 0 disables adapters; `where` is a pattern over the names of weights, `base` a
    checkpoint with trained weights; see `tekoa.lora`.
    """
    return {
        "rank": 0,
        "where": config_dict.placeholder(str),
        "alpha": config_dict.placeholder(float),
        "base": config_dict.placeholder(str),
    }


def adapted(model: Any, config: Any, inputs: Any) -> Any:
    """Returns the model with adapters if its config requests them, else the model itself.

    Args:
        model: Any model that `tekoa.lora` accepts.
        config: The config of the model, with or without an entry `lora` as in `settings`.
        inputs: Sample inputs, or a tuple of them.

    Raises:
        UsageError: If the model cannot be adapted this way, or `base` cannot be read.
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
        "Adapters of rank %d: %d trainable numbers, %d frozen%s.",
        config.rank,
        trees.n_elements(params),
        trees.n_elements(variables[lora.FROZEN]),
        "" if config.base else " (untrained; --module_config.lora.base=PATH loads trained weights)",
    )
    return fns


def _base(path: str | None) -> Any:
    """Loads the parameters of a checkpoint, or their average if it contains one."""
    if path is None:
        return None
    items = load.load(path, items=["average", "model_params"])
    return items.get("average") or items["model_params"]
