"""Evaluation and prediction in the long form: the model file's `infer_step` over batches."""

import logging
import types
from collections.abc import Iterable, Iterator
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np

from tekoa.core import batch as batches
from tekoa.core.model import keep_form
from tekoa.core.trees import PyTree
from tekoa.data import DataError
from tekoa.estimator import states
from tekoa.loop.task import StopFlag
from tekoa.store import restoring

_log = logging.getLogger("tekoa")

Fields = dict[str, Any]


class Inference:
    """Runs `infer_step`; its mutable state goes from batch to batch, and not further.

    Args:
        module: The model file.
        config: What its `load_config` gave.
        frozen: The config that steps are given.
        batch_size: Rows of a full batch.

    Raises:
        TypeError: If `get_infer_state` gives something else than an `InferState`.
    """

    def __init__(self, module: types.ModuleType, config: Any, frozen: Any, *, batch_size: int):
        self._module, self._frozen, self._batch_size = module, frozen, batch_size
        made = module.get_infer_state(config)
        if not isinstance(made, states.InferState):
            raise TypeError(
                "get_infer_state must give a tekoa.estimator.InferState, as InferState.create "
                f"makes it; got {type(made).__name__}."
            )
        names = [
            name
            for name, field in type(made).__dataclass_fields__.items()
            if name != "ret" and field.metadata.get("pytree_node", True)
        ]
        self._start: Fields = {name: getattr(made, name) for name in names}
        self._start["_vars"] = flax.core.unfreeze(made._vars)
        self._frame = made.replace(ret=None, **dict.fromkeys(names))
        self._step = jax.jit(self._run)

    def results(
        self, path: str | None, data: Iterable[tuple[Any, Any]], stop_flag: StopFlag | None
    ) -> Iterator[tuple[Any, Any]]:
        """Runs a stored step over data.

        Args:
            path: The step; None: the model as initialised.
            data: Pairs of what stands beside a batch and the batch. All but the last have
                `batch_size` rows.
            stop_flag: Polled at every batch.

        Yields:
            What stood beside the batch, and its results, for each batch that has any.

        Raises:
            InterruptedError: Once the flag is set.
        """
        fields = self._restored(path)
        waiting: list[tuple[Any, Any, int | None]] = []
        for beside, batch in data:
            if stop_flag is not None and stop_flag.is_set():
                raise InterruptedError("Stopped before all of the data was seen.")
            given, n_rows = self._filled(fields, batch)
            fields, found = self._step(fields, given)
            if found is not None:
                waiting.append((beside, found, n_rows))
            # One behind: the device runs the next batch while this one's results are used.
            if len(waiting) > 1:
                yield _cut(*waiting.pop(0))
        for last in waiting:
            yield _cut(*last)

    def _run(self, fields: Fields, batch: Any) -> tuple[Fields, PyTree]:
        made = self._module.infer_step(self._frozen, batch, self._frame.replace(**fields))
        if not isinstance(made, states.InferState):
            raise TypeError(f"infer_step must give its state, got {type(made).__name__}.")
        new = {name: getattr(made, name) for name in fields}
        new["_vars"] = {**fields["_vars"], **flax.core.unfreeze(new["_vars"])}
        return {name: keep_form(fields[name], new[name], name) for name in fields}, made.ret

    def _filled(self, fields: Fields, batch: Any) -> tuple[Any, int | None]:
        """Fills a last batch up, so that nothing compiles again; gives its own number of rows.

        Results that are not by row cannot be cut back; then the batch stays as it is.
        """
        n_rows = batches.n_rows(batch)
        if n_rows >= self._batch_size:
            return batch, None
        pad = self._batch_size - n_rows
        full = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[-1:], pad, 0)]), batch)
        _, shapes = jax.eval_shape(self._run, fields, full)
        by_row = all(x.shape[:1] == (self._batch_size,) for x in jax.tree.leaves(shapes))
        return (full, n_rows) if by_row else (batch, None)

    def _restored(self, path: str | None) -> Fields:
        if path is None:
            return self._start
        opened = restoring.open_together(path)
        items = {name[0] for name in opened.index.leaves}
        params = "average" if "average" in items else "model_params"
        targets = {params: self._start["params"]}
        variables = self._start["_vars"]
        if variables and "model_state" in items:
            targets["model_state"] = variables
        elif variables and self._frame.save_mutable:
            targets["carry"] = {"collections": variables}
        elif variables and "carry" in items:
            _tell_left(variables)
        found = restoring.restore_step(opened, targets).items
        carried = found.get("carry", {"collections": variables})
        return {
            **self._start,
            "step": jnp.asarray(opened.index.step, jnp.int32),
            "params": found[params],
            "_vars": found.get("model_state", carried["collections"]),
        }


def _tell_left(variables: PyTree) -> None:
    """Running averages that start anew make an evaluation worthless."""
    level = logging.WARNING if "batch_stats" in variables else logging.INFO
    _log.log(
        level,
        "The collections %s start anew, not from the checkpoint. To evaluate with those of "
        "training, pass save_mutable=True to TrainState.create.",
        ", ".join(variables),
    )


def _cut(beside: Any, found: PyTree, n_rows: int | None) -> tuple[Any, PyTree]:
    return beside, jax.tree.map(lambda x: x[:n_rows], jax.device_get(found))


def pairs(data: Iterable[Any], what: str) -> Iterator[tuple[Any, Any]]:
    """Takes batches of `(gold, batch)` apart.

    Raises:
        DataError: If they are something else.
    """
    for batch in data:
        if not (isinstance(batch, tuple) and len(batch) == 2):
            raise DataError(
                f"{what} must give examples (gold, batch): what is right, and what the model "
                f"gets; got a {type(batch).__name__}."
            )
        yield batch
