"""The long form of a model file, run by the loops: `get_train_state`, `train_step` and so on."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections
import optax

from tekoa import data
from tekoa.core import hosts
from tekoa.core.sharding import Layout
from tekoa.estimator import group, mesh
from tekoa.estimator.config import UsageError
from tekoa.estimator.long_infer import Inference, pairs
from tekoa.estimator.long_train import OwnTraining
from tekoa.estimator.long_valid import Validation
from tekoa.estimator.passes import Again, WithFirst
from tekoa.estimator.predictor import Predictor
from tekoa.estimator.run import Run
from tekoa.estimator.short import Kind
from tekoa.loop.checkpoint import Checkpoint, Summary
from tekoa.loop.task import StopFlag
from tekoa.loop.train import TrainLoop

# What each function is called with, for messages.
_ARGUMENTS = {
    "get_train_state": "config, rng",
    "train_step": "config, batch, state, metrics",
    "valid_step": "config, batch, state, metrics",
    "get_infer_state": "config",
    "infer_step": "config, batch, state",
    "get_evaluator": "config",
    "get_predictor": "config",
}


class LongProgram:
    """What the modes need of a model, made of the functions of its file.

    Args:
        run: The run.
        mode: The mode, which `load_config` is told.
    """

    def __init__(self, run: Run, mode: str):
        self._run, self._flags, self._mode = run, run.config, mode
        self._training: OwnTraining | None = None

    def check_data(self, kind: Kind) -> str:
        """Gives the pattern of the data that a mode needs.

        Raises:
            UsageError: If it was not given.
        """
        pattern = getattr(self._flags, f"{kind}_pattern")
        if pattern is None:
            raise UsageError(f"There is no data: give --{kind}_pattern=PATTERN.")
        return pattern

    def train_batches(self, seed: int) -> Any:
        """The endless or finite stream of training batches."""
        flags = self._flags
        stream = self._source("train").batches(
            flags.train_batch_size,
            seed=seed,
            shuffle=flags.train_shuffle_buf,
            epochs=flags.train_epochs,
            consecutive=flags.train_consecutive,
            shard=group.shard(
                mesh.layout_of(self._run), flags.train_batch_size, "train_batch_size"
            ),
        )
        return WithFirst(stream, 0, allow_changes=flags.allow_data_changes)

    def train_loop(
        self, init: Callable[[Any, optax.GradientTransformation], Any], **options: Any
    ) -> TrainLoop:
        """The loop over those batches; `init(model, optimizer)` makes a reader of checkpoints."""
        self._need("get_train_state", "train_step")
        for name, plain in (("accumulate", 1), ("precision", "float32")):
            if options.get(name, plain) != plain:
                raise UsageError(
                    f"--{name} is for models in the short form: this one has a train_step of its "
                    "own, which must do that itself."
                )
        options["layout"] = self._with_rules(options.get("layout"))
        training = self._own_training(options.pop("data"), options["rnkey"])
        self._training = training
        return TrainLoop(init(None, training.optimizer), training, **options)

    def training(self, layout: Layout) -> tuple[OwnTraining, Layout]:
        """What the loop would run, without data; and the layout with the model's own rules."""
        self._need("get_train_state", "train_step")
        return self._own_training((), jax.random.key(0)), self._with_rules(layout)

    def _own_training(self, batches: Any, rng: jax.Array) -> OwnTraining:
        module, config = self._run.module, self._config
        return OwnTraining(module, config, self._frozen, data=batches, rng=rng)

    def _with_rules(self, layout: Any) -> Any:
        named = getattr(self._config, "logical_axis_rules", None)
        if layout is None or not named:
            return layout
        return dataclasses.replace(layout, logical_axis_rules=list(named))

    def validation(
        self, loop: TrainLoop, stop_flag: StopFlag | None = None
    ) -> Callable[[Checkpoint], Summary] | None:
        """The stage that validates a checkpoint and calls `monitor_train`."""
        del loop
        has_data = self._flags.valid_pattern is not None
        monitor = getattr(self._run.module, "monitor_train", None)
        if self._training is None or not (has_data or monitor):
            return None
        if has_data:
            self._need("valid_step")
        return Validation(
            self._run.module,
            self._config,
            self._frozen,
            training=self._training,
            data=self._passes("valid") if has_data else (),
            stop_flag=stop_flag,
        )

    def evaluation(self) -> Callable[[str | None, Any], dict[str, float]]:
        """Makes `evaluate(path, stop_flag)`, which gives the metrics of a stored step."""
        self._need("get_infer_state", "infer_step", "get_evaluator")
        examples = self._passes("eval")
        inference = self._inference(self._flags.eval_batch_size)
        evaluator = self._run.module.get_evaluator(self._config)

        def run(path: str | None, stop_flag: Any) -> dict[str, float]:
            evaluator.reset_states()
            batches = pairs(examples, "eval_data_fn")
            for gold, found in inference.results(path, batches, stop_flag):
                evaluator.update_state(gold, found)
            return {name: float(value) for name, value in evaluator.result().items()}

        return run

    def predictions(self, path: str | None, stop_flag: Any) -> Iterator[Any]:
        """Gives the lines of the file's predictor; one that writes itself leaves none to give."""
        self._need("get_infer_state", "infer_step", "get_predictor")
        batches = ((None, batch) for batch in self._passes("pred"))
        inference = self._inference(self._flags.pred_batch_size)
        predictor = self._run.module.get_predictor(self._config)
        writes_itself = not isinstance(predictor, Predictor) or predictor.output_path is not None
        if writes_itself and self._flags.pred_output is not None:
            raise UsageError("--pred_output has no effect: this model's predictor writes itself.")
        try:
            for _, found in inference.results(path, batches, stop_flag):
                if writes_itself and self._run.config.dry_run:
                    yield found
                elif writes_itself:
                    if hosts.current().is_writer:
                        predictor.consume(found)
                else:
                    yield from predictor.lines(found)
        except InterruptedError:
            return
        if not writes_itself:
            yield from predictor.last_lines()
        elif not self._run.config.dry_run and hosts.current().is_writer:
            predictor.complete()

    def sample(self, kind: Kind) -> Any:
        """One batch of the data of a mode, as its step gets it."""
        if kind == "train":
            return next(iter(self.train_batches(seed=0)))
        batches = iter(self._passes(kind))
        return next(pairs(batches, "eval_data_fn"))[1] if kind == "eval" else next(batches)

    def scales(self) -> Any:
        """Is not to be had: the loss is inside the file's own step.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "Scales are read off a model and its loss, which this model file keeps in its "
            "train_step. They can be read in Python: tekoa.scales(model, loss, batch)."
        )

    def _inference(self, batch_size: int) -> Inference:
        return Inference(self._run.module, self._config, self._frozen, batch_size=batch_size)

    def _need(self, *names: str) -> None:
        for name in names:
            if not hasattr(self._run.module, name):
                raise UsageError(
                    f"{self._run.module.__name__} has no function {name}({_ARGUMENTS[name]}), "
                    f"which {self._mode} needs."
                )

    @functools.cached_property
    def _config(self) -> Any:
        load = getattr(self._run.module, "load_config", None)
        if load is None:
            return self._run.settings
        try:
            config = load(flags_for(self._run, self._mode))
        except AssertionError as error:
            if not str(error):
                raise
            raise UsageError(f"{self._run.module.__name__} cannot run so: {error}") from error
        if config is None:
            raise UsageError(
                f"load_config of {self._run.module.__name__} gave None; it must return the config."
            )
        return config

    @functools.cached_property
    def _frozen(self) -> Any:
        return frozen_of(self._config)

    def _source(self, kind: Kind) -> data.Source:
        """The examples of a pattern, opened by the file's data function."""
        names = data.filenames(self.check_data(kind))
        open_fn = getattr(self._config, f"{kind}_data_fn", None)
        if open_fn is None and kind == "eval":
            raise UsageError(
                "load_config must set config.eval_data_fn, for examples (gold, batch)."
            )
        open_fn = open_fn or data.DataFn()
        take = -1 if kind == "train" else getattr(self._flags, f"num_{kind}_examples")
        opened = functools.partial(open_fn, names, **({} if take < 0 else {"num_take": take}))
        found = opened()
        # What can be read once only is opened again for each pass.
        return data.as_source(opened if isinstance(found, Iterator) else found)

    def _passes(self, kind: Kind) -> Again:
        """One pass over the data, all examples, from its start whenever it is asked for."""
        source = self._source(kind)
        size = getattr(self._flags, f"{kind}_batch_size")
        return Again(lambda: source.batches(size, epochs=1, remainder="keep"))


def flags_for(run: Run, mode: str) -> types.SimpleNamespace:
    """Gives all flags as `load_config` reads them: patterns as lists, and the model's config."""
    values = {
        field.name: getattr(run.config, field.name) for field in dataclasses.fields(run.config)
    }
    for name, value in values.items():
        if name.endswith("_pattern") and value is not None:
            values[name] = value.split(",")
    return types.SimpleNamespace(**{**values, "mode": mode, "module_config": run.settings})


def frozen_of(config: Any) -> Any:
    """Gives the config for steps: its `frozen`, or the config itself, fixed where that can be."""
    frozen = getattr(config, "frozen", None)
    if frozen is None and isinstance(config, ml_collections.ConfigDict):
        frozen = ml_collections.FrozenConfigDict(config)
        with config.unlocked():
            config.frozen = frozen
    return config if frozen is None else frozen
