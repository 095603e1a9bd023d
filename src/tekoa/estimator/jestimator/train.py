"""Training in the long form: runs the `train_step` of a model file on the loop's state.

The `TrainState` of the file and its metrics are built from the engine's state before a step
and converted back after it. Saving, resuming, averaging and the NaN guard therefore work as
in any other training.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import optax

from tekoa.bridges import optimizers
from tekoa.bridges.lora import FROZEN
from tekoa.core import batch as batches
from tekoa.core import nonfinite, trees
from tekoa.core import state as core
from tekoa.core import step as steps
from tekoa.core.model import LogicalAxes, ModelFns, axes_also_in, cast_like
from tekoa.core.trees import PyTree
from tekoa.core.update import average
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.jestimator import states
from tekoa.estimator.jestimator.adapters import adapt
from tekoa.estimator.jestimator.gradients import Gradients, LossRecord
from tekoa.estimator.jestimator.results import MeanMetrics
from tekoa.estimator.model_file import lora
from tekoa.loop.task import Options
from tekoa.optim.scales import auto
from tekoa.optim.scales.table import ScaleTable

_FIELDS = ("step", "params", "opt_state", "_vars", "_state_rng", "_grads", "_frozen")


class OwnTraining:
    """A `Training` for a model file that has its own `train_step`.

    Args:
        module: The model file.
        config: What its `load_config` returned.
        frozen: The config passed to steps.
        data: The batches.
        choose_optimizer: Returns the optimizer to use, from the model file's own.
        choose_adapters: Returns the adapters to train, from the shapes of the parameters.

    Attributes:
        gathered: The sums that `compute` read last, as `train_step` left them.
        optimizer_line: A line about an optimizer that was chosen by name, once it is resolved.
    """

    # No loss: the model file reports it among its own metrics.
    reported: Sequence[str] = ("gradients_l2norm", "weights_l2norm")

    def __init__(
        self,
        module: types.ModuleType,
        config: Any,
        frozen: Any,
        *,
        data: Any,
        choose_optimizer: Callable[[Any], optax.GradientTransformation] = lambda own: own,
        choose_adapters: Callable[[PyTree], ModelFns | None] = lambda params: None,
    ):
        self._module, self._config, self._frozen, self.data = module, config, frozen, data
        shapes = jax.eval_shape(self._own_file_state, jax.random.key(0))
        optimizer = choose_optimizer(shapes.tx)
        self._adapters = choose_adapters(shapes.params)
        if self._adapters is not None:
            lora.check_optimizer(optimizer, self._adapters, (shapes.params,))
        self._keeps_state = optimizer is shapes.tx and self._adapters is None
        # Functions and settings only; the arrays come from the engine's state.
        self._frame = shapes.replace(
            **dict.fromkeys(_FIELDS),
            tx=optimizer,
            _merge=None if self._adapters is None else self._adapters.merge,
        )
        self.optimizer_line = ""
        # The array fields that a subclass of `TrainState` adds.
        self._extras = [name for name in states.array_fields(shapes) if name not in _FIELDS]
        init_metrics = self._frame.metrics_mod.init
        self._init_metrics = jax.jit(lambda rng: flax.core.unfreeze(init_metrics(rng)))
        self.gathered: Any = None

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer: the model file's own unless another was chosen."""
        return self._frame.tx

    def resolve_optimizer(
        self, batch: Any, n_steps: int | None, saved: Mapping[str, Any] | None = None
    ) -> None:
        """Chooses the optimizer if it is named; see `ModelTraining.resolve_optimizer`."""
        find_table = functools.partial(self.scales, batch)
        self.optimizer_line = optimizers.resolve_named(self._frame.tx, find_table, n_steps, saved)

    @property
    def facts(self) -> dict[str, Any]:
        """What a resumed run needs to choose the same optimizer; empty if it has no name."""
        return optimizers.facts_of(self._frame.tx)

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (batch,), ()  # Whatever its structure.

    def axes(self, rng: jax.Array, batch: Any) -> LogicalAxes:
        del rng, batch
        axes = self._frame.logical_axes()
        return axes if self._adapters is None else axes_also_in(FROZEN, axes)

    def init(self, rng: jax.Array, batch: Any, options: Options) -> core.TrainState:
        del batch
        file_state = self._new_file_state(rng)

        @jax.jit
        def convert(fields: dict[str, Any], sums: PyTree) -> core.TrainState:
            state = core.TrainState(
                step=jnp.zeros((), jnp.int32),
                params=fields["params"],
                variables={},
                opt_state=fields["opt_state"],
                average=None if options.ema is None else fields["params"],
                carry=None,
                rng=fields["_state_rng"],
                sums=sums,
                health=core.Health.zero(),
            )
            variables = flax.core.unfreeze(fields["_vars"])
            extras = {name: fields[name] for name in self._extras}
            state = state.replace(**self._variables_and_carry(variables, extras, fields["_frozen"]))
            return jax.tree.map(steps.donatable_copy, state)

        names = (*_FIELDS, *self._extras)
        return convert({name: getattr(file_state, name) for name in names}, self.empty())

    def make_step(self, options: Options, *, keep_grads: bool = False) -> steps.Step:
        """Creates the step.

        It raises `UsageError` if `train_step` does not use `state.value_and_grad_apply_fn`, which
        accumulates gradients and lowers the precision.
        """
        is_lowered = options.precision != "float32"

        def step(state: core.TrainState, batch: Any) -> tuple[core.TrainState, core.StepOutput]:
            n_rows = batches.n_rows(batch)
            record = Gradients(n_rows, options.accumulate, is_lowered=is_lowered)
            old_file_state = self.as_file_state(state).replace(_gradients=record)
            result = self._module.train_step(self._frozen, batch, old_file_state, state.sums)
            if not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(
                    f"train_step must return (state, metrics), got {type(result).__name__}."
                )
            if record.value is None and (options.accumulate > 1 or is_lowered):
                raise UsageError(
                    "--accumulate and --precision need a train_step that computes its gradients "
                    "by state.value_and_grad_apply_fn()."
                )
            file_state, sums = result
            grads = file_state._grads
            params = cast_like(state.params, file_state.params, "params")
            new = state.replace(
                step=state.step + 1,
                params=params,
                opt_state=cast_like(state.opt_state, file_state.opt_state, "optimizer state"),
                average=average.updated_average(state.average, params, options.ema),
                sums=cast_like(state.sums, flax.core.unfreeze(sums), "metrics"),
                **self._updated(old_file_state, file_state),
            )
            params_finite = trees.are_finite(params)
            all_finite = [jnp.ones((), bool)] * len(params_finite)
            new = nonfinite.select_finite(
                state,
                new,
                value=_nan_if_sums_broke(state.sums, new.sums),
                grads=all_finite if grads is None else trees.are_finite(grads),
                params=params_finite,
                on_nan=options.on_nan,
            )
            return new, core.StepOutput(
                loss=jnp.full((), jnp.nan, jnp.float32),
                gradients_l2norm=None if grads is None else trees.global_norm(grads),
                weights_l2norm=trees.global_norm(params),
                grads=grads if keep_grads else None,
            )

        return step

    def scales(self, batch: Any) -> ScaleTable:
        """Finds the scales of the parameters from the loss of `train_step` on a batch.

        Raises:
            UsageError: If `train_step` does not use `state.value_and_grad_apply_fn`.
            ValueError: If its loss cannot be traced.
        """
        file_state, sums = self._own_file_state(jax.random.key(0)), self.empty()

        def losses(params: PyTree, batch: Any) -> list[jax.Array]:
            record = LossRecord(params)
            state = file_state.replace(_gradients=record)
            self._module.train_step(self._frozen, batch, state, sums)
            return record.losses

        if not jax.eval_shape(losses, file_state.params, batch):
            raise UsageError(
                "Scales are found from the loss that train_step passes to "
                "state.value_and_grad_apply_fn(), which this train_step does not call. Call it "
                "there, or use tekoa.find_scales(model, loss, batch) in Python."
            )
        table = auto.scales_of_function(losses, file_state.params, batch)
        if self._adapters is None or self._adapters.adapts is None:
            return table
        return self._adapters.adapts[1](table)

    def empty(self, sums: PyTree = None) -> PyTree:
        del sums
        return self._init_metrics(jax.random.key(0))

    def compute(self, sums: PyTree) -> dict[str, float]:
        self.gathered = jax.device_get(sums)
        return self.read(self.gathered)

    def read(self, sums: PyTree) -> dict[str, float]:
        """Returns metrics by name, without those that have no values."""
        module = self._frame.metrics_mod
        metrics = module.apply(sums)
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"{type(module).__name__} must return its metrics by name, as a dict; got "
                f"{type(metrics).__name__}."
            )
        has_values: Any = {}
        if isinstance(module, MeanMetrics):
            has_values = module.apply(sums, method=MeanMetrics.gathered)
        return {name: float(metrics[name]) for name in metrics if has_values.get(name, True)}

    def as_file_state(self, state: core.TrainState) -> states.TrainState:
        """Creates the state of the model file from the engine's."""
        carry, variables = state.carry or {}, dict(state.variables)
        frozen = None if self._adapters is None else variables.pop(FROZEN)
        return self._frame.replace(
            step=state.step,
            params=state.params,
            opt_state=state.opt_state,
            _vars={**variables, **carry.get("collections", {})},
            _frozen=frozen,
            _state_rng=state.rng,
            **carry.get("fields", {}),
        )

    def _new_file_state(self, rng: jax.Array) -> states.TrainState:
        """Returns the state of the model file, with the chosen adapters and optimizer."""
        state = self._own_file_state(rng)
        if self._keeps_state:
            return state
        # Another stream than those of the model file, which splits the key.
        state = adapt(self._adapters, state, jax.random.fold_in(rng, 1))
        optimizer = self._frame.tx
        return state.replace(tx=optimizer, opt_state=jax.jit(optimizer.init)(state.params))

    def _own_file_state(self, rng: jax.Array) -> states.TrainState:
        state = self._module.get_train_state(self._config, rng)
        if not isinstance(state, states.TrainState):
            raise TypeError(
                "get_train_state must return a tekoa.estimator.TrainState, made by "
                f"TrainState.create; got {type(state).__name__}."
            )
        return state

    def _variables_and_carry(
        self, variables: dict[str, PyTree], extras: PyTree, frozen: PyTree
    ) -> dict[str, Any]:
        """Assigns collections to the model (`variables`) or to training alone (`carry`)."""
        is_saved = self._frame.save_mutable
        carry = {"collections": {} if is_saved else variables, "fields": extras}
        carry = {name: tree for name, tree in carry.items() if tree}
        saved = dict(variables) if is_saved else {}
        if self._adapters is not None:
            saved[FROZEN] = frozen
        return {"variables": saved, "carry": carry or None}

    def _updated(self, old: states.TrainState, new: states.TrainState) -> dict[str, Any]:
        variables = old._vars
        changed = flax.core.unfreeze(new._vars)
        if unknown := sorted(set(changed) - set(variables)):
            raise ValueError(
                f"train_step returned the collections {unknown}, which the model's init did not "
                f"create; it created {sorted(variables)}."
            )
        changed = {name: cast_like(variables[name], changed[name], name) for name in changed}
        extras = {
            name: cast_like(getattr(old, name), getattr(new, name), name) for name in self._extras
        }
        return self._variables_and_carry({**variables, **changed}, extras, old._frozen)


def _nan_if_sums_broke(old: PyTree, new: PyTree) -> jax.Array:
    """Returns NaN if a step turned a finite metric into NaN or Inf (so did its loss), else 0."""
    is_broken = [
        jnp.any(jnp.isfinite(a) & ~jnp.isfinite(b))
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(b.dtype, jnp.inexact)
    ]
    any_broken = jnp.any(jnp.stack(is_broken)) if is_broken else jnp.zeros((), bool)
    return jnp.where(any_broken, jnp.nan, 0.0).astype(jnp.float32)
