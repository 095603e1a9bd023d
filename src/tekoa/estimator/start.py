"""Where training starts: the run's own checkpoints, another checkpoint, or scratch."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.estimator import restore
from tekoa.estimator.config import UsageError
from tekoa.estimator.run import Run
from tekoa.extensions import files
from tekoa.loop.task import Restored
from tekoa.store import errors, leaves, loading, names, restoring, steps, warmstart
from tekoa.store.report import Report

# Of a kind, in a line; a large model would fill the screen.
_N_NAMED = 12


class StartReader:
    """Initialises a `TrainLoop` as the flags say.

    A run goes on from its own newest checkpoint; `--checkpoint_path` counts where there is
    none. A checkpoint inside the run's directory, such as a best one, belongs to the run: it
    is taken whole, unless the run has gone on beyond it. Of any other the parameters are
    taken, and the optimizer starts anew.

    Args:
        run: The run.
        target: The model.
        optimizer: Makes the new optimizer's state.
        data_state: Where the data starts.
    """

    def __init__(
        self, run: Run, target: Any, *, optimizer: optax.GradientTransformation, data_state: Any
    ):
        self.target = target
        self._config, self._model_dir = run.config, run.model_dir
        self._optimizer, self._data_state = optimizer, data_state

    def restore(self, form: TrainState) -> Restored | None:
        """Gives the state to start from in a given form, or None for scratch."""
        given = self._config.checkpoint_path
        if given is None:
            return self._own(form)
        path = self._given(given)
        if path is not None and self._is_ahead(path):
            return self._continued(path, form)
        found = self._own(form)
        if found is None and path is not None:
            return Restored(
                state=lambda fresh: self._started(path, fresh), data_state=self._data_state
            )
        print(
            f"--checkpoint_path={given} is not used: this run has checkpoints of its own. Choose "
            "another --model_dir to start from there.",
            flush=True,
        )
        return found

    def _given(self, given: str) -> pathlib.Path | None:
        """The step asked for; a run that has its own may have outlived it."""
        try:
            return restore.find_step(self._model_dir, given)
        except (UsageError, errors.StoreError):
            if not names.list_steps(self._model_dir):
                raise
            return None

    def _is_ahead(self, path: pathlib.Path) -> bool:
        """Whether a step belongs to this run, and is newer than all that the run has."""
        if not path.resolve().is_relative_to(self._model_dir.resolve()):
            return False
        step = steps.open_step(path).index.step
        return step > max(names.list_steps(self._model_dir), default=-1)

    def _own(self, form: TrainState) -> Restored | None:
        newest = max(names.list_steps(self._model_dir), default=None)
        if newest is not None:
            path = names.step_dir(self._model_dir, newest)
            if (path / names.T5X).is_file() and not (path / names.INDEX).exists():
                return self._continued(path, form)
        reader = files.CheckpointFileReader(
            self._model_dir, self.target, put_aside=not self._config.dry_run
        )
        return reader.restore(form)

    def _continued(self, path: pathlib.Path, form: TrainState) -> Restored:
        """All that a step has; other programs' steps, and those made for inference, lack some."""
        source = steps.open_step(path)
        wanted = files.items_of(form)
        there = {item: tree for item, tree in wanted.items() if item in source.index.items}
        try:
            found = restoring.restore_step(source, {"model_params": form.params, **there})
        except errors.MismatchError as error:
            raise errors.MismatchError(
                f"{path}: {error}\nThe parameters alone are taken by a run in another directory: "
                f"--model_dir=NEW --checkpoint_path={path}.",
                error.differences,
            ) from None
        lacking = [
            item for item, tree in wanted.items() if item not in there and jax.tree.leaves(tree)
        ]

        def complete(fresh: TrainState) -> TrainState:
            stored = {**files.items_of(fresh), "step": _step(source.index.step, fresh)}
            state = files.state_of({**stored, **found.items})
            if "optimizer_state" in lacking:
                opt_state = self._new_optimizer_state(state.params, fresh)
                state = state.replace(opt_state=opt_state)
            if "average" in lacking:
                state = state.replace(average=_copies(state.params, fresh.average))
            anew = ", ".join(item for item in lacking if item != "step")
            if anew:
                print(f"{path} has no {anew}: that starts anew.", flush=True)
            return state

        return Restored(
            state=complete if lacking else files.state_of(found.items),
            data_state=found.meta.get("data_state", self._data_state),
            facts=found.meta.get("facts", {}),
        )

    def _started(self, path: pathlib.Path, fresh: TrainState) -> TrainState:
        """The parameters of a step, and on request its number."""
        source = loading.load(path, items=["model_params", "model_state"])
        target = {"model_params": fresh.params, "model_state": fresh.variables}
        given = {item: source.get(item, {}) for item in target}
        try:
            taken, report = warmstart.warm_start(target, given, strict=False)
        except errors.MismatchError as error:
            raise errors.MismatchError(f"{path}: {error}") from None
        if not self._config.allow_mismatch:
            _refuse(path, report)
        params = taken["model_params"]
        state = fresh.replace(
            params=params,
            variables=taken["model_state"],
            opt_state=self._new_optimizer_state(params, fresh),
            average=None if fresh.average is None else _copies(params, fresh.average),
        )
        if self._config.train_load_step:
            state = state.replace(step=_step(source["step"], fresh))
        print(_told(path, report, with_step=self._config.train_load_step), flush=True)
        return state

    def _new_optimizer_state(self, params: PyTree, fresh: TrainState) -> PyTree:
        """Made of the parameters that were taken: some optimizers keep a copy of them."""
        return _copies(jax.jit(self._optimizer.init)(params), fresh.opt_state)


def _refuse(path: pathlib.Path, report: Report) -> None:
    """Raises if an array has another shape or dtype; lists all that have."""
    rows = [row for row in report.rows if row.outcome in ("other shape", "other dtype")]
    if rows:
        raise errors.MismatchError(
            f"{path} does not fit the model:\n{Report(rows)}\nChange the model's settings, or let "
            "--allow_mismatch leave these as initialised.",
            [row.name for row in rows],
        )


def _copies(tree: PyTree, like: PyTree) -> PyTree:
    """Arrays of their own, placed as others are: the step takes over what it is given."""

    def copied(x: jax.Array, old: jax.Array) -> jax.Array:
        # A number without a dtype of its own would make the step compile twice.
        own = x.copy() if leaves.is_key(x) else jnp.array(x, old.dtype)
        return jax.device_put(own, old.sharding)

    return jax.tree.map(copied, tree, like)


def _step(step: int, fresh: TrainState) -> jax.Array:
    return jax.device_put(fresh.step.at[()].set(step), fresh.step.sharding)


def _told(path: pathlib.Path, report: Report, *, with_step: bool) -> str:
    """What was taken in a line, and in another each kind of what was not."""
    n_taken = len(report.names("taken"))
    n_known = n_taken + len(report.names("missing", "other shape", "other dtype"))
    anew = "the optimizer and the data start" if with_step else "the rest starts"
    lines = [f"Starts from {path}: {n_taken} of {n_known} arrays taken; {anew} anew."]
    kinds = {
        "left as initialised, for want of one in the checkpoint": ("missing",),
        "left as initialised, since shape or dtype differ": ("other shape", "other dtype"),
        "only in the checkpoint": ("unexpected",),
    }
    for words, outcomes in kinds.items():
        found = report.names(*outcomes)
        if found:
            more = f" and {len(found) - _N_NAMED} more" if len(found) > _N_NAMED else ""
            lines.append(f"  {words}: {', '.join(found[:_N_NAMED])}{more}")
    return "\n".join(lines)
