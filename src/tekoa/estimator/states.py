"""The states that a model file in the long form makes and hands from step to step.

They are thin: what they hold is what the engine's own state holds, and the loop stores,
restores and guards it there. Functions and settings travel beside the arrays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from tekoa.bridges import linen
from tekoa.core import trees
from tekoa.core.trees import PyTree

Variables = dict[str, PyTree]


class TrainState(struct.PyTreeNode):
    """What `get_train_state` makes and `train_step` changes.

    Attributes:
        step: Completed steps, counted by the loop.
        apply_fn: `model.apply`.
        params: What is learned.
        tx: The optimizer.
        opt_state: Its state.
        metrics_mod: Gathers metrics; see `MeanMetrics`.
        save_mutable: Whether the model's other collections (`_vars`) belong to the model,
            so that evaluation starts from them, as running averages do. If false they are
            kept for training alone, as the memory of a recurrent model is.
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
    _grads: Any = None  # Those that were applied last, for whoever guards the step.

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
            rng: A key; one half makes the parameters, the other is the root of all steps.
            *init_args: Arguments of `model.init`, such as sample inputs.
            save_mutable: See the class.
            **init_kwargs: More of them.
        """
        init_rng, state_rng = jax.random.split(rng)
        params, variables, axes = _initialised(model, init_rng, init_args, init_kwargs)
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

    def variables(self, params: PyTree = None) -> Variables:
        """All collections for `apply_fn`, with other parameters where they are given."""
        return _joined(self._vars, self.params if params is None else params)

    def mutable(self) -> list[str]:
        """Names of the collections besides the parameters, for `apply_fn(mutable=...)`."""
        return list(self._vars)

    def step_rng(self) -> jax.Array:
        """A key of this step's own."""
        # The same fold as the engine's first stream: both forms of a model draw alike.
        return jax.random.fold_in(jax.random.fold_in(self._state_rng, self.step), 0)

    def value_and_grad_apply_fn(self, has_aux: bool = False) -> Callable[..., Any]:
        """Makes `f(params, *args, **kwargs) -> (value, gradients)` of the model.

        Arguments go to `apply_fn`, which must give the loss. Unless `rngs` is among them,
        the stream "dropout" has the step's own key.

        Args:
            has_aux: The model gives `(loss, aux)` or `(loss, aux, ...)`; the value is then a
                pair of the loss and what follows it, a tuple if it is more than one.

        Returns:
            Where the model has mutable collections, their new values are the last of what
            follows the loss: `(loss, vars)`, `(loss, (aux, vars))`.
        """
        mutable = self.mutable()

        def run(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("rngs", {"dropout": self.step_rng()})
            given, changed = self.apply_fn(self.variables(params), *args, **kwargs, mutable=mutable)
            if has_aux and not isinstance(given, tuple):
                raise TypeError(
                    f"has_aux=True needs a model that gives a tuple (loss, ...), got a "
                    f"{type(given).__name__}."
                )
            loss, rest = (given[0], given[1:]) if has_aux else (given, ())
            if mutable:
                rest = (*rest, changed)
                return loss, rest if has_aux else changed
            return (loss, rest[0] if len(rest) == 1 else rest) if has_aux else loss

        return jax.value_and_grad(run, has_aux=has_aux or bool(mutable))

    def apply_gradients(self, *, grads: PyTree, **changes: Any) -> "TrainState":
        """Updates the parameters and counts the step.

        Args:
            grads: Gradients in the form of the parameters.
            **changes: Other fields to replace.
        """
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(grads, self.opt_state, self.params)
        return self.replace(
            step=self.step + 1,
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
            _grads=grads,
            **changes,
        )

    def logical_axes(self) -> dict[trees.Name, tuple[Any, ...]]:
        """Names that the model gave to the axes of its arrays, by collection and name."""
        return dict(self._axes)


class InferState(struct.PyTreeNode):
    """What `get_infer_state` makes and `infer_step` changes.

    Attributes:
        step: Steps that the parameters were trained for.
        apply_fn: `model.apply`.
        ret: The results of the last batch, one per row; None: there are none.
        params: What was learned.
        save_mutable: If true, the model's other collections are read from the checkpoint
            even where training did not count them as part of the model.
    """

    step: Any
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    ret: Any
    params: PyTree
    save_mutable: bool = struct.field(pytree_node=False, default=False)
    _vars: Any = struct.field(default_factory=dict)

    @classmethod
    def create(
        cls, model: nn.Module, *init_args: Any, save_mutable: bool = False, **init_kwargs: Any
    ) -> "InferState":
        """Initialises a model; its parameters are then read from a checkpoint.

        Args:
            model: A Linen module.
            *init_args: Arguments of `model.init`, such as sample inputs.
            save_mutable: See the class.
            **init_kwargs: More of them.
        """
        params, variables, _ = _initialised(model, jax.random.key(0), init_args, init_kwargs)
        return cls(
            step=jnp.zeros((), jnp.int32),
            apply_fn=model.apply,
            ret=None,
            params=params,
            save_mutable=save_mutable,
            _vars=variables,
        )

    def variables(self, params: PyTree = None) -> Variables:
        """All collections for `apply_fn`, with other parameters where they are given."""
        return _joined(self._vars, self.params if params is None else params)

    def mutable(self) -> list[str]:
        """Names of the collections besides the parameters, for `apply_fn(mutable=...)`."""
        return list(self._vars)


def _joined(variables: Mapping[str, PyTree], params: PyTree) -> Variables:
    return {**variables, "params": params}


def _initialised(
    model: nn.Module, rng: jax.Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[PyTree, Variables, tuple[Any, ...]]:
    """Gives parameters, other collections, and the names of axes."""

    def init(rng: jax.Array) -> Any:
        rngs = linen.rngs_of(rng, ("params", "dropout"))
        return flax.core.unfreeze(model.init(rngs, *args, **kwargs))

    axes = linen.logical_axes(jax.eval_shape(init, rng))

    @jax.jit  # Run op by op, each operation would be compiled by itself.
    def made(rng: jax.Array) -> Any:
        return {name: tree for name, tree in nn.meta.unbox(init(rng)).items() if is_kept(name)}

    def is_kept(name: str) -> bool:
        return name != "intermediates" and not name.endswith("_axes")

    variables = made(rng)
    params = variables.pop("params", {})
    return params, variables, tuple(sorted(axes.items()))
