"""Runs model files in the short form, `experiment(config, data)`, with the loops."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import optax

from tekoa import data, hosts
from tekoa.bridges import any_model
from tekoa.bridges.scales import find_scales
from tekoa.core.loss.reduction import reported_loss
from tekoa.core.model import ModelFns
from tekoa.estimator.cli import processes
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file import lora, optimizers
from tekoa.estimator.model_file.experiment import DataFacts, Experiment
from tekoa.estimator.model_file.program import Kind, ProgramData, TrainParts, with_valid_metrics
from tekoa.estimator.run import eval_state
from tekoa.estimator.run.passes import MarkFirst, Reiterable
from tekoa.estimator.run.run import Run
from tekoa.exchange.program import inference_fn
from tekoa.extensions.generation.samples import TextFns
from tekoa.loop import evaluate, task, train
from tekoa.loop.checkpoint import Checkpoint, Summary
from tekoa.loop.predict import predictions
from tekoa.sharding.layout import Layout
from tekoa.sharding.placement import Placement


class ShortProgram:
    """The `Program` of an `Experiment`; see there for the methods."""

    def __init__(self, run: Run):
        self._run, self._config = run, run.config
        self._data = ProgramData(run, self._open_source)

    def check_data(self, kind: Kind) -> str:
        return self._data.pattern(kind)

    def source(self, kind: Kind) -> data.Source:
        """Returns the data of one kind."""
        return self._data.source(kind)

    def train_batches(self, seed: int) -> Any:
        return self._data.train_batches(seed, mark_first=True)

    def train_parts(self, batches: Iterable[Any], layout: Layout | None) -> TrainParts:
        experiment = self.experiment("train")
        optimizer = self._optimizer(experiment)
        train_task = task.TrainTask(
            optimizer=optimizer,
            loss=experiment.loss,
            data=batches,
            split=experiment.split,
            reduction=experiment.reduction,
            unfreeze_at=optimizers.parse_steps("--unfreeze_at", self._config.unfreeze_at),
            freeze_at=optimizers.parse_steps("--freeze_at", self._config.freeze_at),
            remat=self._config.remat,
            clip_norm=self._config.clip_norm or None,
            grad_noise=self._config.grad_noise or None,
        )
        return TrainParts(
            model=experiment.model,
            task=train_task,
            optimizer=optimizer,
            layout=layout,
            classes=self._data.source("train").info.facts.get("classes"),
        )

    def _optimizer(self, experiment: Experiment) -> optax.GradientTransformation:
        optimizer = optimizers.requested_optimizer(self._config, experiment.make_optimizer)
        if self._config.lora_rank is not None:
            sample = next(self._data.source("train").batches(1, epochs=1))
            lora.check_optimizer(optimizer, experiment.model, experiment.split(sample)[0])
        return optimizer

    def validation(
        self, parts: TrainParts, loop: train.TrainLoop, stop_flag: hosts.StopFlag | None = None
    ) -> Callable[[Checkpoint], Summary] | None:
        del parts

        def stage(name: str) -> Callable[[Checkpoint], Summary]:
            experiment = self.experiment("train")
            metrics = {"loss": reported_loss(experiment.loss), **experiment.metrics}
            passes = self._passes("valid", name)
            validate = loop.evaluation(metrics, passes, label="valid", stop_flag=stop_flag)
            return lambda checkpoint: _as_train_metrics(validate(checkpoint), experiment, name)

        has_main = self._config.valid_pattern is not None
        return self._data.validation(loop, stage, has_main=has_main)

    def text_fns(self) -> TextFns | None:
        return self.experiment("train").text

    def evaluation(self) -> Callable[[str | None, Any], dict[str, float]]:
        experiment = self.experiment("eval")
        if not experiment.metrics:
            raise UsageError(
                "This model cannot be evaluated: its Experiment has no `metrics`. Add some in the "
                "model file, such as metrics={'loss': fn}."
            )
        fns, layout = any_model.as_model_fns(experiment.model), self._data.layout
        passes = self._passes("eval")
        inputs = experiment.split(next(iter(passes)))[0]
        eval_task = task.EvalTask(metrics=experiment.metrics, data=passes, split=experiment.split)

        reader = self._reader(fns, inputs)

        # One loop for all checkpoints: a new one would trace and compile again.
        @functools.cache
        def loop_with(stop_flag: Any) -> evaluate.EvalLoop:
            return evaluate.EvalLoop(eval_task, model=fns, layout=layout, stop_flag=stop_flag)

        def run(path: str | None, stop_flag: Any) -> dict[str, float]:
            summary = loop_with(stop_flag)(reader.load(path))
            return experiment.finish_metrics(summary.metrics["eval"])

        return run

    def predictions(self, path: str | None, stop_flag: Any) -> Iterator[Any]:
        experiment = self.experiment("pred")
        if experiment.predict is None:
            raise UsageError(
                "This model cannot predict: its Experiment has no `predict`. Add one in the model "
                "file: a function of the outputs that returns one result per row."
            )
        fns = any_model.as_model_fns(experiment.model)
        batches = iter(self._passes("pred"))
        first = next(batches, None)
        if first is None:
            return
        layout = self._data.layout
        state = self._reader(fns, experiment.split(first)[0]).load(path).state
        all_outputs = predictions(
            fns,
            state,
            itertools.chain([first], batches),
            split=experiment.split,
            layout=layout,
            stop_flag=stop_flag,
        )
        for outputs in all_outputs:
            yield from np.asarray(experiment.predict(outputs))

    def _reader(self, fns: ModelFns, inputs: tuple[Any, ...]) -> eval_state.EvalReader:
        rules = getattr(self._run.module, "WEIGHT_RULES", None)
        return eval_state.EvalReader(fns, inputs, self._data.layout, weight_rules=rules)

    def sample(self, kind: Kind) -> Any:
        return next(self.train_batches(seed=0) if kind == "train" else iter(self._passes(kind)))

    def inference(self, path: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        experiment = self.experiment("train")
        inputs = experiment.split(self.sample("train"))[0]
        return inference_fn(any_model.as_model_fns(experiment.model), path, inputs), inputs

    def scales(self) -> Any:
        experiment, batch = self.experiment("train"), self.sample("train")
        return find_scales(experiment.model, experiment.loss, batch, split=experiment.split)

    def _open_source(self, kind: Kind, pattern: str) -> data.Source:
        open_data = getattr(self._run.module, "open_data", None)
        if open_data is None:
            source = data.load(pattern)
        else:
            is_train = kind == "train"
            source = data.as_source(open_data(self._run.settings, pattern, train=is_train))
        classes = self._run.classes
        if kind == "valid":
            classes = self._data.source("train").info.facts.get("classes")
        if classes is None:
            return source
        return source.with_classes(classes, unknown=-1 if kind == "pred" else None)

    def _passes(self, kind: Kind, name: str = "") -> Reiterable:
        """Returns the data in order, as an iterable that starts over at every pass."""
        source = self._data.source(kind, name).take(self._data.n_examples(kind))
        size, layout = self._data.batch_size(kind), self._data.layout

        def batches(**options: Any) -> MarkFirst:
            return MarkFirst(source.batches(size, epochs=1, **options), math.inf)

        if layout is None or hosts.current().count == 1:
            return Reiterable(lambda: batches(remainder="keep"))
        return Reiterable(
            lambda: processes.own_rows(
                layout,
                batches,
                n_examples=len(source),
                size=size,
                flag=f"{kind}_batch_size",
                whole=Placement(layout).whole,
            )
        )

    @functools.cache  # noqa: B019 - one program per process
    def facts(self, kind: Kind) -> DataFacts:
        """Returns what `experiment` learns about the data of one kind."""
        source, size = self._data.source(kind), self._config.train_batch_size
        # A stream may have no end.
        n_examples = None if source.reader.is_stream else len(source)
        sample = next(source.batches(min(size, n_examples or size), epochs=1, remainder="keep"))
        return DataFacts(
            info=source.info,
            n_examples=n_examples,
            batch_size=size,
            sample=sample,
            count=source.__len__,
        )

    def experiment(self, kind: Kind) -> Experiment:
        """Returns the experiment for the data of one kind."""
        facts = self.facts(kind)
        experiment = self._run.module.experiment(self._run.settings, facts)
        inputs, _ = experiment.split(facts.sample)
        model = lora.adapted_by_flags(experiment.model, self._config, inputs)
        if experiment.trainable is not None:
            if model is not experiment.model:
                raise UsageError(
                    "--lora_rank: the model file chooses what is trained, by its Experiment's "
                    "`trainable`. Remove it there to train adapters."
                )
            # Here, not in the task: evaluation and prediction split the parameters too.
            model = any_model.as_model_fns(model, trainable=experiment.trainable)
        return dataclasses.replace(experiment, model=model)


def _as_train_metrics(summary: Summary, experiment: Experiment, name: str) -> Summary:
    """Moves validation metrics to the group of training: train/valid_loss and so on."""
    metrics = experiment.finish_metrics(summary.metrics["valid"])
    groups = {group: values for group, values in summary.metrics.items() if group != "valid"}
    return with_valid_metrics(dataclasses.replace(summary, metrics=groups), name, metrics)
