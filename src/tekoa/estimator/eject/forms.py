"""The parts of an ejected file, from a model file in the short or the long form."""

import ast
import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import edits, optimizers, pieces, program
from tekoa.estimator.eject.edits import Source
from tekoa.estimator.eject.optimizers import PlainOptimizer
from tekoa.estimator.eject.source import ModelFiles, ModelSource
from tekoa.estimator.eject.watch import Watch
from tekoa.estimator.jestimator.program import LongProgram
from tekoa.estimator.model_file.experiment import DataFacts
from tekoa.estimator.model_file.program import Program
from tekoa.estimator.model_file.short import ShortProgram
from tekoa.estimator.replay.record import Start
from tekoa.estimator.run.run import Run
from tekoa.loop.task import Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainParts:
    """The parts of an ejected file.

    Attributes:
        imports: Lines that import packages for the parts below.
        source: The code of the model file.
        model: The blocks of code that define model and loss.
        optimizer: The optimizer.
        training: The code that initialises and trains.
    """

    imports: Sequence[str]
    source: ModelSource
    model: Sequence[str]
    optimizer: PlainOptimizer
    training: str


def plain_parts(
    run: Run, model: Program, start: Start, saved: Mapping[str, Any] | None
) -> PlainParts:
    """Builds and traces a step of the run, and returns the code that it needs.

    Args:
        run: The run.
        model: Its model file.
        start: Its first start.
        saved: The choice of an optimizer by name that the run has stored.

    Raises:
        UsageError: If something has no plain equivalent; it says what.
    """
    files = ModelFiles(run.module)
    batch = next(iter(model.train_batches(start.seed)))
    with Watch(files.files, optimizers.WATCHED) as watch:
        training = model.train_parts((), None).training
        resolve = getattr(training, "resolve_optimizer", None)
        if resolve is not None:
            resolve(batch, start.facts.get("n_steps"), saved)
        state = jax.eval_shape(lambda: training.init(jax.random.key(0), batch, Options()))
        jax.eval_shape(training.make_step(Options()), state, batch)
    if isinstance(model, ShortProgram):
        return _short(run, model, files, watch, batch)
    assert isinstance(model, LongProgram)
    return _long(run, files, watch, state.params)


def _short(
    run: Run, model: ShortProgram, files: ModelFiles, watch: Watch, batch: Any
) -> PlainParts:
    experiment = model.experiment("train")
    if experiment.trainable is not None:
        raise UsageError(
            "The model file trains only some of the parameters (`trainable`), so that this run "
            "cannot be ejected."
        )
    variables = watch.variables(run.module.experiment)[-1]
    data = next(value for value in variables.values() if isinstance(value, DataFacts))
    optimizer = optimizers.plain_optimizer(watch, program.own_params(experiment, batch))
    source = files.read(
        ["experiment"],
        watch,
        settings=(run.settings, data),
        replaced=["optimizer"] if optimizer.call else [],
        loss=getattr(experiment.loss, "__name__", ""),
    )
    plain = program.plain_program(
        experiment, batch, drops_metrics=source.drops_metrics, drops_boxes=source.drops_boxes
    )
    definitions = dict(source.definitions)
    blocks, expression = _flattened(definitions.pop("experiment"))
    if expression:
        optimizer = dataclasses.replace(optimizer, call=expression)
    return PlainParts(
        imports=[plain.library.imports],
        source=source,
        model=[*definitions.values(), *blocks, plain.library.before],
        optimizer=optimizer,
        training=plain.code,
    )


def _flattened(text: str) -> tuple[list[str], str]:
    """Returns the body of `experiment` as statements, and the code of the optimizer, if any."""
    tree, source = ast.parse(text), Source(text)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    *before, last = function.body[bool(ast.get_docstring(function)) :]
    call = last.value if isinstance(last, ast.Return) else None
    blocks: list[str] = []
    if not isinstance(call, ast.Call) or call.args or function.args.args:
        raise UsageError(
            "`experiment` must end with `return Experiment(...)`, and use its config and its data "
            "by attributes, to be ejected."
        )
    for stmt in before:
        text = source.lines(edits.first_line(stmt), stmt.end_lineno or stmt.lineno)
        blocks.append(textwrap.dedent(text))
    expression = ""
    for keyword in call.keywords:
        value = source.text(keyword.value)
        if keyword.arg == "optimizer":
            expression = value
        elif isinstance(keyword.value, ast.Lambda):
            arguments, body = ast.unparse(keyword.value.args), source.text(keyword.value.body)
            blocks.append(f"def {keyword.arg}({arguments}):\n    return {body}")
        elif value != keyword.arg:
            blocks.append(f"{keyword.arg} = {value}")
    return blocks, expression


def _long(run: Run, files: ModelFiles, watch: Watch, params: Any) -> PlainParts:
    roots = ["get_train_state", "train_step"]
    variables = [*watch.variables(run.module.get_train_state)]
    variables += watch.variables(run.module.train_step)
    settings = [v for call in variables for v in call.values() if _is_config(v)]
    optimizer = optimizers.plain_optimizer(watch, params)
    source = files.read(roots, watch, settings=tuple(settings))
    definitions = dict(source.definitions)
    if any("nn.scan" in text for text in definitions.values()):
        raise UsageError("Model files in the long form with nn.scan cannot be ejected.")
    arguments = {}
    for name in roots:
        function = ast.parse(definitions[name]).body[0]
        assert isinstance(function, ast.FunctionDef)
        arguments[name] = len(function.args.args)
    if arguments != {"get_train_state": 1, "train_step": 3}:
        raise UsageError(
            "get_train_state and train_step must use their config by attributes to be ejected."
        )
    return PlainParts(
        imports=["from flax import linen as nn", "from flax import struct"],
        source=source,
        model=[pieces.TRAIN_STATE, pieces.MEAN_METRICS, *definitions.values()],
        optimizer=optimizer,
        training=pieces.long_training(changes_optimizer=optimizer.call is not None),
    )


def _is_config(value: Any) -> bool:
    kinds = (ml_collections.ConfigDict, ml_collections.FrozenConfigDict)
    return isinstance(value, kinds)
