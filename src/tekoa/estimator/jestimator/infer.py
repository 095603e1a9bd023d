"""Evaluation and prediction in the long form: runs the `infer_step` of a model file."""

import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np

from tekoa.bridges.lora import FROZEN
from tekoa.core import batch as batches
from tekoa.core.model import ModelFns, cast_like
from tekoa.core.trees import PyTree
from tekoa.data import DataError
from tekoa.estimator.jestimator import states
from tekoa.estimator.jestimator.adapters import adapt
from tekoa.hosts.signals import StopFlag
from tekoa.sharding.layout import Layout
from tekoa.sharding.placement import Placement, with_sharding
from tekoa.store.read import restore

_log = logging.getLogger("tekoa")

Fields = dict[str, Any]


class Inference:
    """Runs `infer_step` over batches. Mutable state lasts for one pass over the data.

    Steps are restored onto the shapes of `get_infer_state`. Only fields and collections that a
    checkpoint does not contain are initialised.

    Args:
        module: The model file.
        config: What its `load_config` returned.
        frozen: The config passed to steps.
        batch_size: Rows in a full batch.
        layout: How parameters and rows are split over the devices of this process.
        choose_adapters: Returns the adapters of the run, from the shapes of the parameters.

    Raises:
        TypeError: If `get_infer_state` does not return an `InferState`.
    """

    def __init__(
        self,
        module: types.ModuleType,
        config: Any,
        frozen: Any,
        *,
        batch_size: int,
        layout: Layout | None = None,
        choose_adapters: Callable[[PyTree], ModelFns | None] = lambda params: None,
    ):
        self._module, self._frozen, self._batch_size = module, frozen, batch_size
        self._config = config
        self._place = Placement(layout)
        self._adapters = choose_adapters(jax.eval_shape(self._own_state).params)
        shapes = jax.eval_shape(self._new_state)
        names = [name for name in states.array_fields(shapes) if name != "ret"]
        self._shapes: Fields = _fields(shapes, names)
        self._shardings = None if layout is None else _shardings(self._shapes, layout, shapes)
        if self._shardings is not None:
            self._shapes = jax.tree.map(with_sharding, self._shapes, self._shardings)
        # Functions and settings only.
        self._frame = shapes.replace(ret=None, **dict.fromkeys(names))
        self._initial = functools.cache(self._compute_initial)
        self._step = jax.jit(self._place.traced(self._run))

    def results(
        self, path: str | None, data: Iterable[tuple[Any, Any]], stop_flag: StopFlag | None
    ) -> Iterator[tuple[Any, Any]]:
        """Runs a stored step over data.

        Args:
            path: The directory of the step; None uses the initial values.
            data: Pairs `(extra, batch)`. All batches but the last have `batch_size` rows.
            stop_flag: Polled at every batch.

        Yields:
            `(extra, results)` for each batch that has results.

        Raises:
            InterruptedError: Once the flag is set.
        """
        fields = self._restore(path)
        pending: list[tuple[Any, Any, int | None]] = []
        for extra, batch in data:
            if stop_flag is not None and stop_flag.is_set():
                raise InterruptedError("Stopped before the end of the data.")
            padded, n_rows = self._pad(fields, batch)
            fields, outputs = self._step(fields, self._place.batch(padded))
            if outputs is not None:
                pending.append((extra, outputs, n_rows))
            # One batch behind, so that the device is busy while these results are used.
            if len(pending) > 1:
                yield _to_host(*pending.pop(0))
        for entry in pending:
            yield _to_host(*entry)

    def function(self, path: str) -> Callable[[Any], PyTree]:
        """Returns the results of a stored step as a function of a batch."""
        fields = self._restore(path)
        return lambda batch: self._run(fields, batch)[1]

    def _new_state(self) -> states.InferState:
        return adapt(self._adapters, self._own_state(), jax.random.key(0))

    def _own_state(self) -> states.InferState:
        state = self._module.get_infer_state(self._config)
        if not isinstance(state, states.InferState):
            raise TypeError(
                "get_infer_state must return a tekoa.estimator.InferState, made by "
                f"InferState.create; got {type(state).__name__}."
            )
        return state

    def _compute_initial(self, names: tuple[str, ...]) -> Fields:
        """Returns the initial values of some fields; what they do not need is not computed."""
        shardings = self._shardings and {name: self._shardings[name] for name in names}
        return jax.jit(lambda: _fields(self._new_state(), names), out_shardings=shardings)()

    def _run(self, fields: Fields, batch: Any) -> tuple[Fields, PyTree]:
        state = self._module.infer_step(self._frozen, batch, self._frame.replace(**fields))
        if not isinstance(state, states.InferState):
            raise TypeError(f"infer_step must return its state, got {type(state).__name__}.")
        new = {name: getattr(state, name) for name in fields}
        new["_vars"] = {**fields["_vars"], **flax.core.unfreeze(new["_vars"])}
        return {name: cast_like(fields[name], new[name], name) for name in fields}, state.ret

    def _pad(self, fields: Fields, batch: Any) -> tuple[Any, int | None]:
        """Pads a short last batch to avoid a compilation; returns its real number of rows.

        The batch is not padded if its results are not one per row: they could not be cut back.
        """
        n_rows = batches.n_rows(batch)
        if n_rows >= self._batch_size:
            return batch, None
        n_missing = self._batch_size - n_rows
        full = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[-1:], n_missing, 0)]), batch)
        _, shapes = jax.eval_shape(self._run, fields, full)
        by_row = all(x.shape[:1] == (self._batch_size,) for x in jax.tree.leaves(shapes))
        return (full, n_rows) if by_row else (batch, None)

    def _restore(self, path: str | None) -> Fields:
        if path is None:
            return self._initial(tuple(self._shapes))
        step = restore.open_together(path)
        items = {name[0] for name in step.index.leaves}
        params = "average" if "average" in items else "model_params"
        targets = {params: self._shapes["params"]}
        variables = self._shapes["_vars"]
        frozen = {} if self._adapters is None else {FROZEN: self._shapes["_frozen"]}
        stored = {name[1] for name in step.index.leaves if name[0] == "model_state"}
        has_variables = bool(variables) and bool(stored - set(frozen))
        if has_variables or frozen:
            targets["model_state"] = {**(variables if has_variables else {}), **frozen}
        if variables and not has_variables and self._frame.save_mutable:
            targets["carry"] = {"collections": variables}
        elif variables and not has_variables and "carry" in items:
            _log_not_restored(variables)
        restored = restore.restore_step(step, targets).items
        fields = {
            "step": jnp.asarray(step.index.step, jnp.int32),
            "params": restored[params],
        }
        if frozen:
            fields["_frozen"] = restored["model_state"].pop(FROZEN)
        if has_variables:
            fields["_vars"] = restored["model_state"]
        elif "carry" in restored:
            fields["_vars"] = restored["carry"]["collections"]
        missing = tuple(name for name in self._shapes if name not in fields)
        return {**self._initial(missing), **fields}


def _fields(state: states.InferState, names: Iterable[str]) -> Fields:
    fields = {name: getattr(state, name) for name in names}
    if "_vars" in fields:
        fields["_vars"] = flax.core.unfreeze(fields["_vars"])
    return fields


def _shardings(fields: Fields, layout: Layout, state: states.InferState) -> Fields:
    """Splits the parameters by the rules of the layout; everything else is on all devices."""
    whole = jax.NamedSharding(layout.mesh, jax.P())
    params = layout.shardings(layout.tree_specs(state.params, state.logical_axes()))
    return {**jax.tree.map(lambda _: whole, fields), "params": params}


def _log_not_restored(variables: PyTree) -> None:
    # Without its running averages, the scores of a model with batch norm are meaningless.
    level = logging.WARNING if "batch_stats" in variables else logging.INFO
    _log.log(
        level,
        "The collections %s start from scratch, not from the checkpoint. To evaluate with those "
        "of training, pass save_mutable=True to TrainState.create.",
        ", ".join(variables),
    )


def _to_host(extra: Any, outputs: PyTree, n_rows: int | None) -> tuple[Any, PyTree]:
    return extra, jax.tree.map(lambda x: x[:n_rows], jax.device_get(outputs))


def pairs(data: Iterable[Any], source: str) -> Iterator[tuple[Any, Any]]:
    """Yields batches after checking that each is a pair `(gold, batch)`.

    Raises:
        DataError: If a batch is something else; it names `source`.
    """
    for batch in data:
        if not (isinstance(batch, tuple) and len(batch) == 2):
            raise DataError(
                f"{source} must return examples (gold, batch): the expected value, and the input "
                f"of the model; got a {type(batch).__name__}."
            )
        yield batch
