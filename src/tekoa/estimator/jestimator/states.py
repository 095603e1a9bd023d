"""The states that model files in the long form create and pass from step to step.

They are thin views. The arrays belong to the engine's state, where the loop saves and restores
them. Functions and settings are stored beside the arrays.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from tekoa.bridges import linen, lora
from tekoa.core import trees
from tekoa.core.trees import PyTree
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.jestimator import modeling
from tekoa.estimator.jestimator.gradients import Gradients

Variables = dict[str, PyTree]


class _Collections:
    """The methods that both states share."""

    params: PyTree
    _vars: Any
    _axes: Any
    _frozen: Any
    _merge: Any

    def variables(self, params: PyTree = None) -> Variables:
        """Returns all collections for `apply_fn`, optionally with other parameters."""
        params = self.params if params is None else params
        return {**self._vars, "params": self._weights(params, self._frozen)}

    def _weights(self, params: PyTree, frozen: PyTree) -> PyTree:
        """Returns the weights the model runs with: the parameters, or those with adapters."""
        return params if self._merge is None else self._merge(params, {lora.FROZEN: frozen})

    def mutable(self) -> list[str]:
        """Returns the names of all collections but "params", for `apply_fn(mutable=...)`."""
        return list(self._vars)

    def logical_axes(self) -> dict[trees.Name, tuple[Any, ...]]:
        """Returns the logical axes of the model's arrays, by collection and name."""
        return dict(self._axes)


class TrainState(_Collections, struct.PyTreeNode):
    """The training state: created by `get_train_state`, updated by `train_step`.

    Attributes:
        step: Completed steps, counted by the loop.
        apply_fn: `model.apply`.
        params: The trainable parameters.
        tx: The optimizer.
        opt_state: The state of the optimizer.
        metrics_mod: Module that accumulates metrics; see `MeanMetrics`.
        save_mutable: Whether the other collections (`_vars`) belong to the model, so that
            evaluation starts from them, like running averages. If false they serve training
            only, like the memory of a recurrent model.
    """

    step: Any
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    params: PyTree
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    opt_state: PyTree
    metrics_mod: Any = struct.field(pytree_node=False)
    save_mutable: bool = struct.field(pytree_node=False, default=False)
    _vars: Any = struct.field(default_factory=dict)
    _state_rng: Any = None
    _axes: Any = struct.field(pytree_node=False, default=())
    _grads: Any = None  # The gradients applied last, for the NaN guard.
    _frozen: Any = None  # The weights to which `params` are adapters, if they are.
    _merge: Any = struct.field(pytree_node=False, default=None)
    _gradients: Any = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        metrics_mod: Any,
        optimizer: optax.GradientTransformation,
        model: nn.Module,
        rng: jax.Array,
        *init_args: Any,
        save_mutable: bool = False,
        **init_kwargs: Any,
    ) -> "TrainState":
        """Initialises model and optimizer.

        Args:
            metrics_mod: A Linen module such as `MeanMetrics.create("train_loss")`.
            optimizer: Any optax transformation.
            model: A Linen module.
            rng: A key, split into one for the parameters and one for all steps.
            *init_args: Positional arguments of `model.init`, such as sample inputs.
            save_mutable: See the class.
            **init_kwargs: Keyword arguments of `model.init`.
        """
        init_rng, state_rng = jax.random.split(rng)
        params, variables, axes = _init_model(model, init_rng, init_args, init_kwargs)
        return cls(
            step=jnp.zeros((), jnp.int32),
            apply_fn=model.apply,
            params=params,
            tx=optimizer,
            opt_state=jax.jit(optimizer.init)(params),
            metrics_mod=metrics_mod,
            save_mutable=save_mutable,
            _vars=variables,
            _state_rng=state_rng,
            _axes=axes,
        )

    def step_rng(self) -> jax.Array:
        """Returns the random key of this step."""
        # Folded like the engine's first stream, so that both forms draw the same numbers.
        return jax.random.fold_in(jax.random.fold_in(self._state_rng, self.step), 0)

    def value_and_grad_apply_fn(self, has_aux: bool = False) -> Callable[..., Any]:
        """Returns `f(params, *args, **kwargs) -> (value, gradients)` for the model.

        Arguments are passed to `apply_fn`, which must return the loss. Unless `rngs` is one of
        them, the stream "dropout" uses `step_rng()`.

        Args:
            has_aux: Whether the model returns `(loss, aux)` or `(loss, aux, ...)`. The value is
                then `(loss, aux)`, with a tuple as `aux` if there are several.

        Returns:
            A function. If the model has mutable collections, their new values are appended to
            what follows the loss: `(loss, vars)`, `(loss, (aux, vars))`.
        """
        mutable = self.mutable()
        record = self._gradients or Gradients(n_rows=0)

        def value_and_grad(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("rngs", {"dropout": self.step_rng()})
            (loss, (aux, changed)), grads = record.compute(
                functools.partial(self._loss, has_aux),
                params,
                {**self._vars, **({} if self._merge is None else {lora.FROZEN: self._frozen})},
                (args, kwargs),
                keeps_variables=self.save_mutable,
            )
            changed = {name: changed[name] for name in changed if name in mutable}
            if not has_aux:
                return ((loss, changed) if mutable else loss), grads
            if mutable:
                return (loss, (*aux, changed)), grads
            return (loss, aux[0] if len(aux) == 1 else aux), grads

        return value_and_grad

    def _loss(self, has_aux: bool, params: PyTree, variables: Any, inputs: Any, i: Any) -> Any:
        """Returns `(loss, (other results, changed variables))` for part `i` of a batch."""
        args, kwargs = inputs
        if not isinstance(i, int):  # Another mask in each part.
            rngs = {name: jax.random.fold_in(rng, i) for name, rng in kwargs["rngs"].items()}
            kwargs = {**kwargs, "rngs": rngs}
        rest = {name: tree for name, tree in variables.items() if name in self._vars}
        weights = self._weights(params, variables.get(lora.FROZEN))
        with modeling.dropout_in_scans():
            outputs, changed = self.apply_fn(
                {**rest, "params": weights}, *args, **kwargs, mutable=list(rest)
            )
        if not has_aux:
            return outputs, ((), flax.core.unfreeze(changed))
        if not isinstance(outputs, tuple):
            raise TypeError(
                f"has_aux=True needs a model that returns a tuple (loss, ...), got a "
                f"{type(outputs).__name__}."
            )
        loss, *aux = outputs
        return loss, (tuple(aux), flax.core.unfreeze(changed))

    def apply_gradients(self, *, grads: PyTree, **changes: Any) -> "TrainState":
        """Updates the parameters and counts the step.

        Args:
            grads: Gradients with the structure of the parameters.
            **changes: Other fields to replace.
        """
        tx = optax.with_extra_args_support(self.tx)
        record, extra = self._gradients, {}
        if record is not None and record.value is not None:  # For a line search.
            extra = {"value": record.value, "grad": grads, "value_fn": record.value_fn}
        try:
            updates, opt_state = tx.update(grads, self.opt_state, self.params, **extra)
        except TypeError as error:
            if extra or "keyword-only argument" not in str(error):
                raise
            raise UsageError(
                f"The optimizer needs the loss: {error}. Compute the gradients in train_step by "
                "state.value_and_grad_apply_fn(), which passes it on."
            ) from error
        return self.replace(
            step=self.step + 1,
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
            _grads=grads,
            **changes,
        )


class InferState(_Collections, struct.PyTreeNode):
    """The inference state: created by `get_infer_state`, updated by `infer_step`.

    Attributes:
        step: Number of steps the parameters were trained for.
        apply_fn: `model.apply`.
        ret: Results of the last batch, one per row; None if it has no results.
        params: The trained parameters.
        save_mutable: Whether to read the other collections from the checkpoint even if
            training kept them for itself (`TrainState.save_mutable=False`).
    """

    step: Any
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    ret: Any
    params: PyTree
    save_mutable: bool = struct.field(pytree_node=False, default=False)
    _vars: Any = struct.field(default_factory=dict)
    _axes: Any = struct.field(pytree_node=False, default=())
    _frozen: Any = None
    _merge: Any = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls, model: nn.Module, *init_args: Any, save_mutable: bool = False, **init_kwargs: Any
    ) -> "InferState":
        """Initialises a model; its parameters are read from a checkpoint later.

        Args:
            model: A Linen module.
            *init_args: Positional arguments of `model.init`, such as sample inputs.
            save_mutable: See the class.
            **init_kwargs: Keyword arguments of `model.init`.
        """
        params, variables, axes = _init_model(model, jax.random.key(0), init_args, init_kwargs)
        return cls(
            step=jnp.zeros((), jnp.int32),
            apply_fn=model.apply,
            ret=None,
            params=params,
            save_mutable=save_mutable,
            _vars=variables,
            _axes=axes,
        )


def array_fields(state: TrainState | InferState) -> list[str]:
    """Returns the names of the fields that hold arrays, including those of a subclass."""
    fields = type(state).__dataclass_fields__.items()
    return [name for name, field in fields if field.metadata.get("pytree_node", True)]


def _init_model(
    model: nn.Module, rng: jax.Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[PyTree, Variables, tuple[Any, ...]]:
    """Returns parameters, other collections, and logical axes."""

    def init(rng: jax.Array) -> Any:
        rngs = linen.rngs_of(rng, ("params", "dropout"))
        with modeling.dropout_in_scans():
            return flax.core.unfreeze(model.init(rngs, *args, **kwargs))

    axes = linen.logical_axes(jax.eval_shape(init, rng))

    @jax.jit  # Without jit, every operation would be compiled separately.
    def init_unboxed(rng: jax.Array) -> Any:
        return {
            name: tree
            for name, tree in nn.meta.unbox(init(rng)).items()
            if name != "intermediates" and not name.endswith("_axes")
        }

    variables = init_unboxed(rng)
    params = variables.pop("params", {})
    return params, variables, tuple(sorted(axes.items()))
