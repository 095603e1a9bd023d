"""Loads stored steps of any format as checkpoints for evaluation."""

import logging
import os
import pathlib
from typing import Any

import jax

from tekoa import hosts
from tekoa.core import files, objective
from tekoa.core.model import ModelFns
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.estimator.cli.flags import UsageError
from tekoa.exchange import names, trained, weights_file
from tekoa.loop.checkpoint import Summary
from tekoa.sharding.layout import Layout
from tekoa.sharding.placement import Placement
from tekoa.store.commit import paths, together
from tekoa.store.formats import step as step_lib
from tekoa.store.mirror import mirror
from tekoa.store.read import newest, restore

_log = logging.getLogger("tekoa")


class EvalReader:
    """Loads the parameters (their average, if stored) and variables of stored steps.

    Shapes and shardings are determined once, without computing an initial value. Each step is
    restored onto them, so that no process ever holds an unsharded copy.

    Args:
        fns: The model.
        inputs: Sample inputs.
        layout: The layout of the arrays; each shard is read where it belongs.
        weight_rules: How files of weights name the arrays; see `exchange.names`.
    """

    def __init__(
        self,
        fns: ModelFns,
        inputs: tuple[Any, ...],
        layout: Layout | None = None,
        *,
        weight_rules: names.Rules | None = None,
    ):
        self._namings = names.namings_for(weight_rules)
        self._fns, self._inputs = fns, inputs
        self._place = Placement(layout)
        self._params, variables = self._place.model_shapes(fns, inputs)
        self._variables, self._carry = objective.split_carry(variables)

    def load(self, path: str | os.PathLike[str] | None) -> Summary:
        """Returns a stored step as a checkpoint.

        Its carry, if the model has one, is only a shape: an evaluation starts from a new carry.

        Args:
            path: The directory of the step, or a file of weights; None creates the initial values
                of the model.

        Raises:
            errors.MismatchError: If the step does not fit the model; lists all differences.
        """
        if path is None:
            params, variables = self._initial()
            return self._summary(0, params, variables)
        if weights_file.is_weights_file(path):
            return self._load_weights(path)
        stored = restore.open_together(path)
        index = stored.index
        has_average = any(name[0] == "average" for name in index.leaves)
        item = "average" if has_average else "model_params"
        targets = {item: self._params}
        if "model_state" in index.items:
            targets["model_state"] = self._variables
        restored = restore.restore_step(stored, targets).items
        variables = restored.get("model_state")
        if variables is None:
            variables = self._variables and self._missing_variables(path)
        return self._summary(index.step, restored[item], variables)

    def _load_weights(self, path: str | os.PathLike[str]) -> Summary:
        variables = self._variables
        if names.random_streams({names.VARIABLES: variables}):  # Files need not have them.
            variables = self._initial()[1]
        target = {names.PARAMS: self._params, names.VARIABLES: variables}
        stored, _ = weights_file.read_safetensors(path, target, self._namings)
        loaded = trained.like(target, stored, str(path))
        placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), loaded, target)
        return self._summary(0, placed[names.PARAMS], placed[names.VARIABLES])

    def _initial(self) -> tuple[PyTree, dict[str, PyTree]]:
        params, variables = self._place.new_model(self._fns, self._inputs)
        return params, objective.split_carry(variables)[0]

    def _missing_variables(self, path: str | os.PathLike[str]) -> dict[str, PyTree]:
        _log.warning(
            "%s contains no %s; they start from their initial values.",
            path,
            ", ".join(self._variables),
        )
        return self._initial()[1]

    def _summary(self, step: int, params: PyTree, variables: dict[str, PyTree]) -> Summary:
        state = TrainState.of_parts(params, step=step, variables=variables, carry=self._carry)
        return Summary(state=state, step=step, metrics={"train": {}})


def find_step(model_dir: pathlib.Path, checkpoint_path: str | None) -> pathlib.Path:
    """Returns the step to start from, evaluate or predict with: the requested or newest one.

    Args:
        model_dir: The directory of the run.
        checkpoint_path: One step, the msgpack file of a T5X step, a directory of steps, or a file
            of weights.

    Raises:
        UsageError: If there is no step.
        errors.NothingUsableError: If there are steps, but no valid one.
    """
    path = model_dir
    if checkpoint_path is not None:
        path = files.local_path(checkpoint_path).absolute()
        if path.is_file() and weights_file.is_weights_file(path):
            return path
        if path.is_file() and path.name == paths.T5X:
            path = path.parent
        if not path.is_dir():
            problem = "is not a checkpoint" if path.exists() else "does not exist"
            raise UsageError(
                f"--checkpoint_path={checkpoint_path} {problem}. Use the directory of a step "
                "(checkpoint_<step>), a directory that contains steps, or a .safetensors file."
            )
        if step_lib.is_step(path):
            return path

    mirror.complete(path)

    def find_newest() -> int:
        valid = newest.newest_valid(path, step_lib.open_step)
        if valid is None:
            raise UsageError(
                f"{mirror.shown(path)} has no checkpoint yet. Train first, or set "
                "--checkpoint_path."
            )
        return valid.step

    what = "search for the newest step"
    return paths.step_dir(path, together.run_on_writer(hosts.current(), what, find_newest))
