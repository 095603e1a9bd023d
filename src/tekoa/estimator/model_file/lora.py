"""Low-rank adapters by flags: `--lora_rank=4`, or a model's own `--module_config.lora.rank=4`."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import optax
from ml_collections import config_dict

from tekoa.bridges import lora
from tekoa.core import trees
from tekoa.core.model import ModelFns
from tekoa.estimator.cli.flags import RunConfig, UsageError
from tekoa.optim import named
from tekoa.optim.amos import transform
from tekoa.store import errors
from tekoa.store.read import load

_log = logging.getLogger("tekoa")

_HINT = "Choose one of optax, such as --optimizer=adamw."


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
    return _adapted(model, dict(config), inputs, flag="--module_config.lora.")


def adapted_by_flags(model: Any, config: RunConfig, inputs: Any) -> Any:
    """Returns the model with the adapters of `--lora_rank`, or the model itself without it.

    Raises:
        UsageError: If the model cannot be adapted this way, or `--lora_base` cannot be read.
    """
    settings = {
        name: getattr(config, f"lora_{name}") for name in ("rank", "where", "alpha", "base")
    }
    if settings["rank"] is not None:
        return _adapted(model, settings, inputs, flag="--lora_")
    for name, value in settings.items():
        if value is not None:
            raise UsageError(f"--lora_{name} needs --lora_rank=N.")
    return model


def check_optimizer(
    optimizer: optax.GradientTransformation, fns: ModelFns, inputs: tuple[Any, ...]
) -> None:
    """Checks that an optimizer can train the adapters of `--lora_rank`.

    Raises:
        UsageError: If it fails on them, or sets scales that are those of full weights.
    """
    if isinstance(optimizer, named.NamedOptimizer):
        return  # Its scales are those of the adapters.
    params, _ = jax.eval_shape(fns.init, jax.random.key(0), inputs)
    try:
        scales = transform.scales_of(optimizer, params)
    except UsageError:
        raise
    except Exception as error:  # Of the model file's own code.
        raise UsageError(
            f"--lora_rank: the optimizer does not accept the adapters: {error} {_HINT}"
        ) from error
    if scales:
        raise UsageError(
            "--lora_rank: the Amos of the model has the scales of full weights, not those of the "
            f"adapters. {_HINT}"
        )


def _adapted(model: Any, settings: Mapping[str, Any], inputs: Any, *, flag: str) -> ModelFns:
    """Returns the model with adapters; `flag` is what the names of the settings start with."""
    options = {name: settings[name] for name in ("where", "alpha")}
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        fns = lora.lora(model, settings["rank"], base=_base(settings["base"]), **options)
        params, variables = jax.eval_shape(fns.init, jax.random.key(0), inputs)
    except (ValueError, errors.StoreError) as error:
        raise UsageError(f"{flag}rank: {error}") from None
    _log.info(
        "Adapters of rank %d: %d trainable numbers, %d frozen%s.",
        settings["rank"],
        trees.n_elements(params),
        trees.n_elements(variables[lora.FROZEN]),
        "" if settings["base"] else f" (untrained; {flag}base=PATH loads trained weights)",
    )
    return fns


def _base(path: str | None) -> Any:
    """Loads the parameters of a checkpoint, or their average if it contains one."""
    if path is None:
        return None
    items = load.load(path, items=["average", "model_params"])
    return items.get("average") or items["model_params"]
