"""Scales and roles for models of every supported library."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tekoa.bridges import any_model
from tekoa.core import batch as batches
from tekoa.core import objective, trees
from tekoa.core.model import merge_untrained
from tekoa.optim.scales import auto, table, trace

# Models with more parameters are read from shapes alone: the arrays of a single process could
# not hold them.
_LARGE = 2**28


def find_scales(
    model: Any,
    loss: Callable[..., Any] | None,
    batch: Any,
    *,
    apply: Callable[..., Any] | None = None,
    split: objective.Split = batches.split_batch,
) -> table.ScaleTable:
    """Finds the scale, slot shape and role of every parameter from the model's loss.

    Parameters are not initialised; only their shapes are needed. For a plain function of
    parameters use `scales_of_function`. Low-rank adapters, from `tekoa.lora`, have scales at which
    their product is as large as the weight that they change.

    Args:
        model: Anything that `TrainLoop` accepts: a Linen, NNX or Equinox module, a Haiku
            transformed pair, `ModelFns`, or an init function or parameters with `apply`.
        loss: `loss(*outputs, *targets)`, as in `TrainTask`; None if the model returns the loss.
        batch: One batch of training data, or its shapes as `jax.ShapeDtypeStruct`. Of models with
            more than 268 million parameters, only the shapes are used.
        apply: The function that runs the model, if `model` does not include it.
        split: Splits a batch into inputs and targets, as in `TrainTask`.

    Returns:
        One row per parameter that is trained. Its `eta_fn` and `shape_fn` are arguments of `amos`.

    >>> import jax.numpy as jnp
    >>> model = any_model.as_model_fns({'w': jnp.zeros((100, 10))}, lambda p, x: x @ p['w'])
    >>> batch = 2 * jnp.ones((8, 100)), jnp.zeros((8, 10))
    >>> print(find_scales(model, lambda y, target: jnp.mean((y - target) ** 2), batch))
    name  shape      eta   slot     role       reason
    w     (100, 10)  0.05  (1, 10)  cf output  contracted over axes 0: 100 terms of rms 2
    """
    fns = any_model.as_model_fns(model, apply)
    if fns.adapts is not None:
        inner, convert = fns.adapts
        return convert(find_scales(inner, loss, batch, split=split))
    rng = jax.random.key(0)
    inputs, targets = split(batch)

    def init_all(rng: jax.Array, inputs: Any) -> Any:
        # What is not trained still shapes the data that trained parameters see.
        return merge_untrained(*fns.init(rng, inputs))

    trained, _ = jax.eval_shape(fns.init, rng, inputs)
    params, _ = jax.eval_shape(init_all, rng, inputs)
    if trees.n_elements(params) > _LARGE:
        inputs, targets = jax.eval_shape(lambda *parts: parts, inputs, targets)
    # Running averages start with values that matter; XLA drops the computation of parameters.
    variables = jax.jit(lambda rng, inputs: init_all(rng, inputs)[1])(rng, _as_arrays(inputs))

    def compute_loss(params: Any, variables: Any, inputs: Any, targets: Any) -> Any:
        # Without dropout: the scale is that of the model in evaluation.
        outputs, _ = fns.apply(params, variables, inputs, rng=rng, train=False)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs if loss is None else loss(*outputs, *targets)

    try:
        full_table = auto.scales_of_function(compute_loss, params, variables, inputs, targets)
    except trace.TraceError as error:
        # The user knows the model and the loss, not `compute_loss`.
        raise error.__cause__ or error from None
    names = set(trees.leaf_names(trained))
    return table.ScaleTable(
        [row for row in full_table if row.name in names], depth=full_table.depth
    )


def _as_arrays(inputs: Any) -> Any:
    """Returns zeros in place of shapes."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, inputs
    )
