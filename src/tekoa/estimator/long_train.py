"""Training in the long form: the model file's own step, on the loop's state.

The file's `TrainState` and its metrics are made of the engine's state before a step and
taken apart after it. So what is stored, resumed, guarded and averaged is the same as for
any other training.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import optax

from tekoa.core import guard, sequence, trees
from tekoa.core import state as core
from tekoa.core import step as steps
from tekoa.core.model import keep_form
from tekoa.core.trees import PyTree
from tekoa.estimator import states
from tekoa.estimator.metrics import MeanMetrics
from tekoa.loop.training import Options

_FIELDS = ("step", "params", "opt_state", "_vars", "_state_rng", "_grads")


class OwnTraining:
    """What the loop runs for a model file that has its own `train_step`.

    Args:
        module: The model file.
        config: What its `load_config` gave.
        frozen: The config that steps are given.
        data: The batches.
        rng: Any key, to learn the form of the state.

    Attributes:
        gathered: The metrics that were read last, as `train_step` left them.
    """

    # The loss is the file's own affair, among its metrics.
    tells: Sequence[str] = ("gradients_l2norm", "weights_l2norm")

    def __init__(
        self, module: types.ModuleType, config: Any, frozen: Any, *, data: Any, rng: jax.Array
    ):
        self._module, self._config, self._frozen = module, config, frozen
        self.data = data
        form = jax.eval_shape(self._made, rng)
        # Functions and settings; the arrays are those of the engine's state.
        self._frame = form.replace(**dict.fromkeys(_FIELDS))
        self._extras = _extra_fields(form)
        self.gathered: Any = None

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The model file's optimizer."""
        return self._frame.tx

    def split(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Takes a batch of any structure."""
        return (batch,), ()

    def axes(self, rng: jax.Array, batch: Any) -> dict[trees.Name, tuple[Any, ...]]:
        """Names of the axes of the model's arrays."""
        del rng, batch
        return self._frame.logical_axes()

    def init(self, rng: jax.Array, batch: Any, options: Options) -> core.TrainState:
        """Makes the engine's state of the file's."""
        del batch
        made = self._made(rng)

        @jax.jit
        def owned(made: dict[str, Any], sums: PyTree) -> core.TrainState:
            fresh = core.TrainState(
                step=jnp.zeros((), jnp.int32),
                params=made["params"],
                variables={},
                opt_state=made["opt_state"],
                average=None if options.ema is None else made["params"],
                carry=None,
                rng=made["_state_rng"],
                sums=sums,
                health=core.healthy(),
            )
            kept = self._kept(flax.core.unfreeze(made["_vars"]), made["extras"])
            return jax.tree.map(steps.owned, fresh.replace(**kept))

        fields = {name: getattr(made, name) for name in _FIELDS}
        extras = {name: getattr(made, name) for name in self._extras}
        return owned({**fields, "extras": extras}, self._no_metrics())

    def make_step(self, options: Options, *, keep_grads: bool = False) -> steps.Step:
        """Makes the engine's step of `train_step`.

        Raises:
            ValueError: If an option is asked for that only the model file could provide.
        """
        if options.accumulate != 1 or options.precision != "float32":
            raise ValueError(
                "accumulate and precision are the affair of train_step where a model file has one."
            )

        def step(state: core.TrainState, batch: Any) -> tuple[core.TrainState, core.StepOutput]:
            given = self.as_file_state(state)
            made, sums = self._run(batch, given, state.sums)
            grads = made._grads
            params = keep_form(state.params, made.params, "params")
            new = state.replace(
                step=state.step + 1,
                params=params,
                opt_state=keep_form(state.opt_state, made.opt_state, "optimizer state"),
                average=steps.moved(state.average, params, options.ema),
                sums=keep_form(state.sums, flax.core.unfreeze(sums), "metrics"),
                **self._changed(given, made),
            )
            are_fine = trees.are_finite(params)
            of_grads = [jnp.ones((), bool)] * len(are_fine)
            new = guard.guarded(
                state,
                new,
                value=_nan_where_spoilt(state.sums, new.sums),
                grads=of_grads if grads is None else trees.are_finite(grads),
                params=are_fine,
                on_nan=options.on_nan,
            )
            return new, core.StepOutput(
                loss=jnp.full((), jnp.nan, jnp.float32),
                gradients_l2norm=None if grads is None else trees.global_norm(grads),
                weights_l2norm=trees.global_norm(params),
                grads=grads if keep_grads else None,
            )

        return step

    def make_steps(self, options: Options) -> steps.Step:
        """Makes a function that runs one step for each of several batches."""
        counting = dataclasses.replace(options, on_nan="count")
        return sequence.in_sequence(
            self.make_step(counting), self.make_step(options), options.on_nan
        )

    def empty(self, sums: PyTree) -> PyTree:
        """Gives metrics before anything is gathered."""
        del sums
        return self._no_metrics()

    def compute(self, sums: PyTree) -> dict[str, float]:
        """Reads the metrics that have gathered anything."""
        self.gathered = jax.device_get(sums)
        return self.read(self.gathered)

    def read(self, gathered: PyTree) -> dict[str, float]:
        """Gives metrics by name; those that nothing was added to are left out."""
        module = self._frame.metrics_mod
        found = module.apply(gathered)
        if not isinstance(found, Mapping):
            raise TypeError(
                f"{type(module).__name__} must give its metrics by name, as a dict; got "
                f"{type(found).__name__}."
            )
        is_there: Any = {}
        if isinstance(module, MeanMetrics):
            is_there = module.apply(gathered, method=MeanMetrics.gathered)
        return {name: float(found[name]) for name in found if is_there.get(name, True)}

    def as_file_state(self, state: core.TrainState) -> states.TrainState:
        """Makes the file's state of the engine's."""
        carry = state.carry or {}
        return self._frame.replace(
            step=state.step,
            params=state.params,
            opt_state=state.opt_state,
            _vars={**state.variables, **carry.get("collections", {})},
            _state_rng=state.rng,
            **carry.get("fields", {}),
        )

    def _made(self, rng: jax.Array) -> states.TrainState:
        made = self._module.get_train_state(self._config, rng)
        if not isinstance(made, states.TrainState):
            raise TypeError(
                "get_train_state must give a tekoa.estimator.TrainState, as TrainState.create "
                f"makes it; got {type(made).__name__}."
            )
        return made

    def _run(self, batch: Any, given: states.TrainState, sums: PyTree) -> tuple[Any, Any]:
        made = self._module.train_step(self._frozen, batch, given, sums)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise TypeError(f"train_step must give (state, metrics), got {type(made).__name__}.")
        return made

    def _kept(self, variables: Mapping[str, PyTree], extras: PyTree) -> dict[str, Any]:
        """Tells what belongs to the model from what training alone hands on."""
        carry = {"collections": {} if self._frame.save_mutable else variables, "fields": extras}
        carry = {name: tree for name, tree in carry.items() if tree}
        kept = dict(variables) if self._frame.save_mutable else {}
        return {"variables": kept, "carry": carry or None}

    def _changed(self, given: states.TrainState, made: states.TrainState) -> dict[str, Any]:
        variables = given._vars
        changed = flax.core.unfreeze(made._vars)
        if unknown := sorted(set(changed) - set(variables)):
            raise ValueError(
                f"train_step gave the collections {unknown}, which the model's init did not; known "
                f"are {sorted(variables)}."
            )
        form = {name: keep_form(variables[name], changed[name], name) for name in changed}
        extras = {
            name: keep_form(getattr(given, name), getattr(made, name), name)
            for name in self._extras
        }
        return self._kept({**variables, **form}, extras)

    @functools.cached_property
    def _new_metrics(self) -> Any:
        return jax.jit(lambda rng: flax.core.unfreeze(self._frame.metrics_mod.init(rng)))

    def _no_metrics(self) -> PyTree:
        return self._new_metrics(jax.random.key(0))


def _extra_fields(state: states.TrainState) -> list[str]:
    """Arrays of a class derived from `TrainState`, to be carried from step to step."""
    return [
        name
        for name, field in type(state).__dataclass_fields__.items()
        if name not in _FIELDS and field.metadata.get("pytree_node", True)
    ]


def _nan_where_spoilt(old: PyTree, new: PyTree) -> jax.Array:
    """NaN if a step made a metric that was finite not finite: its loss was not."""
    spoilt = [
        jnp.any(jnp.isfinite(a) & ~jnp.isfinite(b))
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(b.dtype, jnp.inexact)
    ]
    is_spoilt = jnp.any(jnp.stack(spoilt)) if spoilt else jnp.zeros((), bool)
    return jnp.where(is_spoilt, jnp.nan, 0.0).astype(jnp.float32)
