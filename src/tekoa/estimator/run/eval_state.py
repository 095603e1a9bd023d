"""Loads stored steps of any format as checkpoints for evaluation."""

import logging
import os
import pathlib
from typing import Any

from tekoa import hosts
from tekoa.core import files, objective
from tekoa.core.model import ModelFns
from tekoa.core.state import TrainState
from tekoa.core.trees import PyTree
from tekoa.estimator.cli.flags import UsageError
from tekoa.loop.checkpoint import Summary
from tekoa.sharding.layout import Layout
from tekoa.sharding.placement import Placement
from tekoa.store.commit import paths, together
from tekoa.store.formats import step as step_lib
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
    """

    def __init__(self, fns: ModelFns, inputs: tuple[Any, ...], layout: Layout | None = None):
        self._fns, self._inputs = fns, inputs
        self._place = Placement(layout)
        self._params, variables = self._place.model_shapes(fns, inputs)
        self._variables, self._carry = objective.split_carry(variables)

    def load(self, path: str | os.PathLike[str] | None) -> Summary:
        """Returns a stored step as a checkpoint.

        Its carry, if the model has one, is only a shape: an evaluation starts from a new carry.

        Args:
            path: The directory of the step; None creates the initial values of the model.

        Raises:
            errors.MismatchError: If the step does not fit the model; lists all differences.
        """
        if path is None:
            params, variables = self._initial()
            return self._summary(0, params, variables)
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
        checkpoint_path: One step, the msgpack file of a T5X step, or a directory of steps.

    Raises:
        UsageError: If there is no step.
        errors.NothingUsableError: If there are steps, but no valid one.
    """
    path = model_dir
    if checkpoint_path is not None:
        path = files.local_path(checkpoint_path).absolute()
        if path.is_file() and path.name == paths.T5X:
            path = path.parent
        if not path.is_dir():
            problem = "is not a checkpoint" if path.exists() else "does not exist"
            raise UsageError(
                f"--checkpoint_path={checkpoint_path} {problem}. Use the directory of a step "
                "(checkpoint_<step>), or a directory that contains steps."
            )
        if step_lib.is_step(path):
            return path

    def find_newest() -> int:
        valid = newest.newest_valid(path, step_lib.open_step)
        if valid is None:
            raise UsageError(
                f"{path} has no checkpoint yet. Train first, or set --checkpoint_path."
            )
        return valid.step

    what = "search for the newest step"
    return paths.step_dir(path, together.run_on_writer(hosts.current(), what, find_newest))
