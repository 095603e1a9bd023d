"""The short form of a model file, run by the loops: `experiment(config, data)`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
import optax

from tekoa import data
from tekoa.bridges import detect
from tekoa.core import hosts, objective
from tekoa.core import metrics as means
from tekoa.core import step as steps
from tekoa.core.model import ModelFns
from tekoa.core.sharding import Layout
from tekoa.estimator import group, mesh, optimizers, restore
from tekoa.estimator import module as modules
from tekoa.estimator.config import UsageError
from tekoa.estimator.passes import Again, WithFirst
from tekoa.estimator.run import Run
from tekoa.loop import evaluate, task, train
from tekoa.loop.checkpoint import Checkpoint, Summary
from tekoa.loop.placement import Placement
from tekoa.loop.training import ModelTraining

Kind = Literal["train", "valid", "eval", "pred"]


class ShortProgram:
    """What the modes need of a model, made of its `Experiment`."""

    def __init__(self, run: Run):
        self._run, self._config = run, run.config

    @functools.cached_property
    def _layout(self) -> Layout | None:
        return mesh.layout_of(self._run)

    def train_batches(self, seed: int) -> Any:
        """The endless or finite stream of training batches."""
        config = self._config
        stream = self._source("train").batches(
            config.train_batch_size,
            seed=seed,
            shuffle=config.train_shuffle_buf,
            epochs=config.train_epochs,
            consecutive=config.train_consecutive,
            shard=group.shard(self._layout, config.train_batch_size, "train_batch_size"),
        )
        return WithFirst(
            stream, config.train_consecutive or 0, allow_changes=config.allow_data_changes
        )

    def train_loop(
        self, init: Callable[[Any, optax.GradientTransformation], Any], **options: Any
    ) -> train.TrainLoop:
        """The loop over those batches; `init(model, optimizer)` makes a reader of checkpoints."""
        experiment = self._experiment("train")
        given = self._task(options.pop("data"))
        return train.TrainLoop(init(experiment.model, given.optimizer), given, **options)

    def training(self, layout: Layout) -> tuple[ModelTraining, Layout]:
        """What the loop would run, without data; and the layout."""
        fns = detect.as_model_fns(self._experiment("train").model)
        return ModelTraining(fns, self._task(())), layout

    def _task(self, batches: Iterable[Any]) -> task.TrainTask:
        experiment = self._experiment("train")
        return task.TrainTask(
            optimizer=experiment.make_optimizer(),
            loss=_with_mean(experiment.loss),
            data=batches,
            split=experiment.split,
        )

    def validation(
        self, loop: train.TrainLoop, stop_flag: task.StopFlag | None = None
    ) -> Callable[[Checkpoint], Summary] | None:
        """The stage that validates a checkpoint, where there is data for it."""
        if self._config.valid_pattern is None:
            return None
        experiment = self._experiment("train")
        measures = {"loss": _loss_metric(experiment), **experiment.metrics}
        found = self._evaluation("valid", experiment, loop.model_fns, measures, stop_flag)
        return lambda checkpoint: _as_train_metrics(found(checkpoint), experiment)

    def evaluation(self) -> Callable[[str | None, Any], dict[str, float]]:
        """Makes `evaluate(path, stop_flag)`, which gives the metrics of a stored step."""
        experiment = self._experiment("eval")
        if not experiment.metrics:
            raise UsageError("This model has no metrics to evaluate.")
        fns = detect.as_model_fns(experiment.model)
        sample = experiment.split(next(iter(self._passes("eval"))))[0]

        def run(path: str | None, stop_flag: Any) -> dict[str, float]:
            checkpoint = restore.for_evaluation(path, fns, sample, self._layout)
            loop = self._evaluation("eval", experiment, fns, experiment.metrics, stop_flag)
            return experiment.finished(loop(checkpoint).metrics["eval"])

        return run

    def predictions(self, path: str | None, stop_flag: Any) -> Iterator[Any]:
        """Gives one result per example of `pred_pattern`, in order."""
        experiment = self._experiment("pred")
        if experiment.predict is None:
            raise UsageError("This model cannot predict: its Experiment has no `predict`.")
        fns = detect.as_model_fns(experiment.model)
        place = Placement(self._layout)
        step = place.jit_gathered(steps.make_predict_step(fns, split=experiment.split))
        checkpoint, rng = None, jax.random.key(0)
        params: Any = {}
        variables: Any = {}
        for i, batch in enumerate(self._passes("pred")):
            if stop_flag.is_set():
                return
            placed = place.batch(batch)
            if checkpoint is None:
                inputs = experiment.split(batch)[0]
                checkpoint = restore.for_evaluation(path, fns, inputs, self._layout)
                state = checkpoint.state
                params, variables = place.model(
                    fns,
                    state.eval_params,
                    objective.with_carry(state.variables, state.carry),
                    inputs,
                )
            outputs, variables = step(params, variables, placed, jax.random.fold_in(rng, i))
            yield from np.asarray(experiment.predict(outputs))

    def sample(self, kind: Kind) -> Any:
        """One batch of the data of a mode, as its step gets it."""
        return next(self.train_batches(seed=0) if kind == "train" else iter(self._passes(kind)))

    def scales(self) -> Any:
        """The table of Amos scales, read off the model on one training batch."""
        experiment = self._experiment("train")
        batch = self.sample("train")
        return optimizers.scales_of(
            experiment.model, experiment.loss, batch, split=experiment.split
        )

    def check_data(self, kind: Kind) -> str:
        """Gives the pattern of the data that a mode needs.

        Raises:
            UsageError: If it was not given.
        """
        pattern = getattr(self._config, f"{kind}_pattern")
        if pattern is None:
            raise UsageError(f"There is no data: give --{kind}_pattern=PATTERN.")
        return pattern

    def _source(self, kind: Kind) -> data.Source:
        pattern = self.check_data(kind)
        opened = getattr(self._run.module, "open_data", None)
        if opened is None:
            return data.load(pattern)
        return data.as_source(opened(self._run.settings, pattern, train=kind == "train"))

    def _passes(self, kind: Kind) -> Again:
        """One pass over the data, all examples, from its start whenever it is asked for."""
        source = self._source(kind).take(getattr(self._config, f"num_{kind}_examples"))
        size = getattr(self._config, f"{kind}_batch_size")

        def batches(**options: Any) -> WithFirst:
            return WithFirst(source.batches(size, epochs=1, **options), math.inf)

        layout = self._layout
        if layout is None or hosts.current().count == 1:
            return Again(lambda: batches(remainder="keep"))
        return Again(
            lambda: group.own_rows(
                layout,
                batches,
                n_examples=len(source),
                size=size,
                flag=f"{kind}_batch_size",
                whole=Placement(layout).whole,
            )
        )

    @functools.cache  # noqa: B019 - one program per process
    def _experiment(self, kind: Kind) -> modules.Experiment:
        source, size = self._source(kind), self._config.train_batch_size
        n_examples = len(source)
        facts = modules.DataFacts(
            info=source.info,
            n_examples=n_examples,
            batch_size=size,
            sample=next(source.batches(min(size, n_examples), epochs=1, remainder="keep")),
        )
        return self._run.module.experiment(self._run.settings, facts)

    def _evaluation(
        self,
        kind: Kind,
        experiment: modules.Experiment,
        fns: ModelFns,
        measures: Any,
        stop_flag: Any = None,
    ) -> evaluate.EvalLoop:
        return evaluate.EvalLoop(
            task.EvalTask(metrics=measures, data=self._passes(kind), split=experiment.split),
            init=fns,
            label=kind,
            layout=self._layout,
            stop_flag=stop_flag,
        )


def _with_mean(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the loss a metric too: what is told is its mean since the check before."""

    def wrapped(*outputs_and_batch: Any) -> tuple[Any, dict[str, Any]]:
        value, found = _value_and_metrics(loss(*outputs_and_batch))
        return value, {"loss": value, **found}

    return wrapped


def _loss_metric(experiment: modules.Experiment) -> Callable[..., Any]:
    return lambda *outputs_and_batch: _value_and_metrics(experiment.loss(*outputs_and_batch))[0]


def _value_and_metrics(found: Any) -> tuple[Any, Mapping[str, Any]]:
    is_pair = isinstance(found, tuple) and not isinstance(found, means.Mean)
    return found if is_pair else (found, {})


def _as_train_metrics(summary: Summary, experiment: modules.Experiment) -> Summary:
    """Validation is part of what training tells: train/valid_loss and so on."""
    found = experiment.finished(summary.metrics["valid"])
    named = {f"valid_{name}": value for name, value in found.items()}
    groups = {group: values for group, values in summary.metrics.items() if group != "valid"}
    return dataclasses.replace(
        summary, metrics={**groups, "train": {**groups.get("train", {}), **named}}
    )
