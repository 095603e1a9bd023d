"""The parts of an ejected file, from a model file in the short or the long form."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import libraries, plain, training
from tekoa.estimator.eject.optimizers import PlainOptimizer
from tekoa.estimator.eject.source import Code
from tekoa.estimator.jestimator.program import LongProgram
from tekoa.estimator.model_file.program import Program
from tekoa.estimator.model_file.short import ShortProgram
from tekoa.estimator.replay.record import Start
from tekoa.estimator.run.run import Run
from tekoa.loop.task import ChoosesOptimizer, Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainParts:
    """The parts of an ejected file.

    Attributes:
        imports: Lines that import packages.
        sections: Blocks of code by title.
    """

    imports: Sequence[str]
    sections: Mapping[str, list[str]]


def plain_parts(
    run: Run, program: Program, start: Start, saved: Mapping[str, Any] | None
) -> PlainParts:
    """Returns the code of model, optimizer and training of a run.

    Args:
        run: The run.
        program: Its model file.
        start: Its first start.
        saved: The choice of an optimizer by name that the run has stored.

    Raises:
        UsageError: If something has no plain equivalent; it says what.
    """
    batch = next(iter(program.train_batches(start.seed)))
    parts = program.train_parts((), None)
    if isinstance(parts.training, ChoosesOptimizer):
        parts.training.resolve_optimizer(batch, start.facts.get("n_steps"), saved)
    devices = start.facts.get("devices", {})
    is_single_cpu = devices.get("kind") == "cpu" and devices.get("count", 1) == 1
    if isinstance(program, ShortProgram):
        return _short(run, program, parts.optimizer, batch, is_single_cpu)
    assert isinstance(program, LongProgram)
    state = jax.eval_shape(lambda: parts.training.init(jax.random.key(0), batch, Options()))
    tx = parts.optimizer if run.config.optimizer is not None else None
    return _long(run, program, tx, state.params, is_single_cpu)


def _short(run: Run, program: ShortProgram, tx: Any, batch: Any, is_single_cpu: bool) -> PlainParts:
    experiment = program.experiment("train")
    if experiment.trainable is not None:
        raise UsageError(
            "The model file trains only some of the parameters (`trainable`), so that this run "
            "cannot be ejected."
        )
    seen = training.trace(experiment, batch, pathlib.Path(run.module.__file__ or "").parent)
    code = Code(run.module, seen.ran)
    if isinstance(experiment.model, nn.Module):
        model = f"model = {code.linen(experiment.model)}"
    else:  # Of which the arguments are not known.
        arguments = (run.settings, program.facts("train"))
        model = code.assignment(run.module.experiment, "model", arguments)
    library, steps = training.plain_training(experiment, seen, code, run.config.clip_norm)
    n_model = len(code.blocks)
    params = libraries.own_params(experiment, batch)
    optimizer = PlainOptimizer(code, params, is_single_cpu=is_single_cpu)
    tx_code = optimizer.expression(tx)
    n_optimizer = len(code.blocks)
    code.add_definition(plain, "are_finite")
    if isinstance(experiment.model, nn.Module):
        model = f"model = {code.linen(experiment.model, is_root=True)}"
    _write_tuples(code.blocks)
    blocks = [*code.blocks.values()]
    return PlainParts(
        imports=[*code.imports, library.imports],
        sections={
            "Model and loss": [*blocks[:n_model], model, library.before],
            "Optimizer": [
                *blocks[n_model:n_optimizer],
                "\n".join([*optimizer.blocks, f"tx = {tx_code}"]),
            ],
            "Training": [*blocks[n_optimizer:], steps],
        },
    )


def _write_tuples(blocks: dict[str, str]) -> None:
    """Writes tuples in place of `Mean(total, count)`, unless they are used by name."""
    others = [text for name, text in blocks.items() if name != "Mean"]
    if "Mean" in blocks and not re.search(
        r"\.(total|count)\b|\bMean\b(?!\()|\b(total|count)=", "\n".join(others)
    ):
        # Its place stays: the parts of the file are told apart by the number of blocks.
        blocks.update({name: re.sub(r"\bMean\(", "(", text) for name, text in blocks.items()})
        blocks["Mean"] = ""


def _long(run: Run, program: LongProgram, tx: Any, params: Any, is_single_cpu: bool) -> PlainParts:
    code = Code(run.module)
    config = f"CONFIG = {code.expression(program.config)}"
    for name in ("get_train_state", "train_step"):
        code.add_definition(run.module, name)
    optimizer = PlainOptimizer(code, params, is_single_cpu=is_single_cpu)
    chosen = [] if tx is None else [f"tx = {optimizer.expression(tx)}"]
    return PlainParts(
        imports=[*code.imports],
        sections={
            "Model and step": [*code.blocks.values(), config],
            "Optimizer": ["\n".join([*optimizer.blocks, *chosen])],
            "Training": [training.long_training(changes_optimizer=tx is not None)],
        },
    )
