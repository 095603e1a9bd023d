"""Starts training from the run's own checkpoints, another checkpoint, or scratch."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tekoa.core import messages, trees
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.run import eval_state, rewind
from tekoa.estimator.run.run import Run
from tekoa.exchange import names, weights_file
from tekoa.extensions import checkpoint_files
from tekoa.loop.task import Restored
from tekoa.store import errors
from tekoa.store.commit import paths
from tekoa.store.formats import step as step_lib
from tekoa.store.mirror import mirror
from tekoa.store.read import load
from tekoa.store.read import restore as restore_lib
from tekoa.store.store import Store
from tekoa.store.transfer import warm_start
from tekoa.store.transfer.report import Report

# Longer lists of names would fill the screen.
_N_NAMED = 12


class StartReader:
    """Initialises a `TrainLoop` as the flags request.

    A run resumes from its own newest checkpoint; `--checkpoint_path` is used only if there is
    none. A checkpoint inside the run's directory, such as a best one, belongs to the run: it is
    resumed completely, unless the run has a newer one. With `--train_load_step` the newer ones
    are set aside; see `rewind`. From any other checkpoint only the parameters are loaded, and the
    optimizer starts from scratch.

    Args:
        run: The run.
        target: The model.
        optimizer: Creates the new optimizer state.
        data_state: The data position of a new run.
        checkpoint_store: The run's own steps, open for writing: newer damaged steps are
            quarantined, or newer steps set aside. None (in a dry run) changes nothing.
    """

    def __init__(
        self,
        run: Run,
        target: Any,
        *,
        optimizer: optax.GradientTransformation,
        data_state: Any,
        checkpoint_store: Store | None = None,
    ):
        self.target, self._store = target, checkpoint_store
        self._config, self._model_dir = run.config, run.model_dir
        self._optimizer, self._data_state = optimizer, data_state
        self._namings = names.namings_for(getattr(run.module, "WEIGHT_RULES", None))

    def restore(self, fresh: TrainState) -> Restored | None:
        """Returns the state to start from, with the structure of `fresh`; None: from scratch."""
        requested = self._config.checkpoint_path
        if requested is None:
            return self._resume_run(fresh)
        path = self._find_requested(requested)
        is_file = weights_file.is_weights_file(requested)
        if is_file and self._config.train_load_step:
            raise UsageError(f"--train_load_step: {requested} has no step, only weights.")
        is_inside = not is_file and rewind.is_inside(self._model_dir, path or requested)
        is_rewinding = is_inside and self._config.train_load_step
        is_rewound = is_rewinding and rewind.is_done(self._model_dir, requested)
        if path is not None and is_rewinding and not is_rewound:
            restored = self._resume_step(path, fresh)
            # Only now: a step that does not fit the model must leave the run as it was.
            if self._store is not None:
                rewind.rewind(self._store, path, requested)
            return restored
        if path is not None and is_inside and self._is_ahead(path):
            return self._resume_step(path, fresh)
        restored = self._resume_run(fresh)
        if restored is None and path is not None:
            return Restored(
                state=lambda fresh: self._warm_start(path, fresh), data_state=self._data_state
            )
        if is_rewound:
            print(rewind.describe_done(self._model_dir, requested), flush=True)
            return restored
        advice = f"Use a new --model_dir to start from {requested}"
        if path is not None and is_inside:
            advice += ", or set --train_load_step to rewind the run to it"
        print(
            f"Ignoring --checkpoint_path={requested} because --model_dir already contains "
            f"checkpoints. {advice}.",
            flush=True,
        )
        return restored

    def _find_requested(self, requested: str) -> pathlib.Path | None:
        """Returns the requested step; None if it is gone but the run has its own checkpoints."""
        try:
            return eval_state.find_step(self._model_dir, requested)
        except (UsageError, errors.StoreError):
            if not paths.list_steps(self._model_dir):
                raise
            return None

    def _is_ahead(self, path: pathlib.Path) -> bool:
        """Whether a step is newer than all checkpoints of the run."""
        step = step_lib.open_step(path).index.step
        return step > max(paths.list_steps(self._model_dir), default=-1)

    def _resume_run(self, form: TrainState) -> Restored | None:
        newest = max(paths.list_steps(self._model_dir), default=None)
        if newest is not None:
            path = paths.step_dir(self._model_dir, newest)
            if (path / paths.T5X).is_file() and not (path / paths.INDEX).exists():
                return self._resume_step(path, form)
        restore = functools.partial(restore_lib.restore, self._model_dir)
        if self._store is not None:
            restore = self._store.restore
        loaded = checkpoint_files.load_newest(restore, form)
        return loaded and checkpoint_files.restored_of(loaded)

    def _resume_step(self, path: pathlib.Path, form: TrainState) -> Restored:
        """Restores all items of a step. Steps written by other programs may lack some."""
        source = step_lib.open_step(path)
        targets = checkpoint_files.items_of(form)
        stored = {item: tree for item, tree in targets.items() if item in source.index.items}
        try:
            restored = restore_lib.restore_step(source, {"model_params": form.params, **stored})
        except errors.MismatchError as error:
            raise errors.MismatchError(
                f"{path}: {error}\nTo load the parameters alone, start a run in another directory: "
                f"--model_dir=NEW --checkpoint_path={path}.",
                error.differences,
            ) from None
        missing = [
            item for item, tree in targets.items() if item not in stored and jax.tree.leaves(tree)
        ]

        def complete(fresh: TrainState) -> TrainState:
            items = {**checkpoint_files.items_of(fresh), "step": _step(source.index.step, fresh)}
            state = checkpoint_files.state_of({**items, **restored.items})
            if "optimizer_state" in missing:
                opt_state = self._new_optimizer_state(state.params, fresh)
                state = state.replace(opt_state=opt_state)
            if "average" in missing:
                state = state.replace(average=_copy_like(state.params, fresh.average))
            if names := ", ".join(item for item in missing if item != "step"):
                print(f"{path} contains no {names}; it is initialised from scratch.", flush=True)
            return state

        return Restored(
            state=complete if missing else checkpoint_files.state_of(restored.items),
            data_state=restored.meta.get("data_state", self._data_state),
            facts=restored.meta.get("facts", {}),
            commit=restored.commit.digest,
        )

    def _warm_start(self, path: pathlib.Path, fresh: TrainState) -> TrainState:
        """Loads the parameters of a step and, if requested, its step number."""
        target = {"model_params": fresh.params, "model_state": fresh.variables}
        source: Mapping[str, Any]
        if weights_file.is_weights_file(path):
            source, _ = weights_file.read_safetensors(path, target, self._namings)
        else:
            source = load.load(path, items=list(target))
        stored = {item: source.get(item, {}) for item in target}
        try:
            loaded, report = warm_start.warm_start(target, stored, strict=False)
        except errors.MismatchError as error:
            raise errors.MismatchError(f"{path}: {error}") from None
        if not self._config.allow_mismatch:
            _check_shapes(path, report)
        params = loaded["model_params"]
        state = fresh.replace(
            params=params,
            variables=loaded["model_state"],
            opt_state=self._new_optimizer_state(params, fresh),
            average=None if fresh.average is None else _copy_like(params, fresh.average),
        )
        if self._config.train_load_step:
            state = state.replace(step=_step(source["step"], fresh))
        print(describe_warm_start(path, report, with_step=self._config.train_load_step), flush=True)
        return state

    def _new_optimizer_state(self, params: PyTree, fresh: TrainState) -> PyTree:
        # Computed from the loaded parameters: some optimizers keep a copy of them.
        return _copy_like(jax.jit(self._optimizer.init)(params), fresh.opt_state)


def _check_shapes(path: pathlib.Path, report: Report) -> None:
    """Raises an error that lists all arrays whose shape or dtype differs."""
    rows = [row for row in report.rows if row.outcome in ("other shape", "other dtype")]
    if rows:
        raise errors.MismatchError(
            f"{path} does not fit the model:\n{Report(rows)}\nChange the settings of the model, or "
            "set --allow_mismatch to keep the initial values of these arrays.",
            [row.name for row in rows],
        )


def _copy_like(tree: PyTree, like: PyTree) -> PyTree:
    """Copies arrays to the placement of `like`; the step donates its arguments."""

    def copy(x: jax.Array, old: jax.Array) -> jax.Array:
        # A weakly typed array would compile the step twice.
        copied = x.copy() if trees.is_key(x) else jnp.array(x, old.dtype)
        return jax.device_put(copied, old.sharding)

    return jax.tree.map(copy, tree, like)


def _step(step: int, fresh: TrainState) -> jax.Array:
    return jax.device_put(fresh.step.at[()].set(step), fresh.step.sharding)


def describe_warm_start(path: pathlib.Path, report: Report, *, with_step: bool) -> str:
    """Returns one line about the loaded arrays, and one for each reason to skip some."""
    n_loaded = len(report.names("loaded"))
    n_arrays = n_loaded + len(report.names("missing", "other shape", "other dtype"))
    new = "optimizer and data" if with_step else "optimizer, data and step"
    lines = [
        f"Warm start from {mirror.shown(path)}: loaded {n_loaded} of {n_arrays} arrays; {new} "
        "start from scratch."
    ]
    reasons = {
        "not in the checkpoint (initial values kept)": ("missing",),
        "other shape or dtype (initial values kept)": ("other shape", "other dtype"),
        "only in the checkpoint": ("unexpected",),
    }
    for reason, outcomes in reasons.items():
        if names := report.names(*outcomes):
            lines.append(f"  {reason}: {messages.some_of(names, _N_NAMED)}")
    return "\n".join(lines)
