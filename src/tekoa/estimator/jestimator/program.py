"""Runs model files in the long form, `get_train_state`, `train_step` and so on, with the loops."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_collections

from tekoa import data, hosts
from tekoa.core import batch as batch_lib
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.jestimator.adapters import adapters_of
from tekoa.estimator.jestimator.infer import Inference, pairs
from tekoa.estimator.jestimator.results import Predictor
from tekoa.estimator.jestimator.train import OwnTraining
from tekoa.estimator.jestimator.valid import Validation
from tekoa.estimator.model_file import optimizers
from tekoa.estimator.model_file.program import Kind, ProgramData, TrainParts
from tekoa.estimator.run import layout as layout_lib
from tekoa.estimator.run.passes import Reiterable
from tekoa.estimator.run.run import Run
from tekoa.hosts.signals import StopFlag
from tekoa.loop.checkpoint import Checkpoint, Summary
from tekoa.loop.train import TrainLoop
from tekoa.sharding.layout import Layout

# Parameters of each function, for error messages.
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
    """The `Program` of a model file's own functions; see there for the methods.

    Args:
        run: The run.
        mode: The mode, passed on to `load_config`.
        loaded: What `load_config` returned, if it was called before.
    """

    def __init__(self, run: Run, mode: str, *, loaded: Any = None):
        self._run, self._flags, self._mode, self._loaded = run, run.config, mode, loaded
        self._data = ProgramData(run, self._open_source)

    def check_data(self, kind: Kind) -> str:
        return self._data.pattern(kind)

    def train_batches(self, seed: int) -> Any:
        return self._data.train_batches(seed, mark_first=False)

    def train_parts(self, batches: Iterable[Any], layout: Layout | None) -> TrainParts:
        self._require("get_train_state", "train_step")
        for name in ("remat", "clip_norm", "grad_noise", "unfreeze_at", "freeze_at"):
            if getattr(self._flags, name) is not None:
                raise UsageError(
                    f"--{name} changes the step of Tekoa, but this model file has its own "
                    "train_step. Change it there."
                )
        if self._flags.precision == "fp16":
            raise UsageError(
                "--precision=fp16 scales the loss in the step of Tekoa, but this model file has "
                "its own train_step. Use --precision=bf16."
            )
        training = OwnTraining(
            self._run.module,
            self._config,
            self._frozen,
            data=batches,
            choose_optimizer=lambda own: optimizers.requested_optimizer(self._flags, lambda: own),
            choose_adapters=functools.partial(adapters_of, self._flags),
        )
        layout = self._with_rules(layout)
        return TrainParts(model=None, task=training, optimizer=training.optimizer, layout=layout)

    def _with_rules(self, layout: Layout | None) -> Layout | None:
        """Adds the rules of the model file to a layout."""
        rules = getattr(self._config, "logical_axis_rules", None)
        if layout is None or not rules:
            return layout
        return dataclasses.replace(layout, logical_axis_rules=list(rules))

    def validation(
        self, parts: TrainParts, loop: TrainLoop, stop_flag: StopFlag | None = None
    ) -> Callable[[Checkpoint], Summary] | None:
        training = parts.task
        if not isinstance(training, OwnTraining):
            return None
        has_main = self._flags.valid_pattern is not None

        def stage(name: str) -> Validation:
            has_data = has_main or name != ""
            if has_data:
                self._require("valid_step")
            return Validation(
                self._run.module,
                self._config,
                self._frozen,
                training=training,
                data=self._passes("valid", name) if has_data else (),
                stop_flag=stop_flag,
                name=name,
            )

        has_monitor = hasattr(self._run.module, "monitor_train")
        return self._data.validation(loop, stage, has_main=has_main or has_monitor)

    def text_fns(self) -> None:
        return None

    def evaluation(self) -> Callable[[str | None, Any], dict[str, float]]:
        self._require("get_infer_state", "infer_step", "get_evaluator")
        examples = self._passes("eval")
        inference = self._inference(self._flags.eval_batch_size)
        evaluator = self._run.module.get_evaluator(self._config)

        def run(path: str | None, stop_flag: Any) -> dict[str, float]:
            evaluator.reset_states()
            batches = pairs(examples, "eval_data_fn")
            for gold, results in inference.results(path, batches, stop_flag):
                evaluator.update_state(gold, results)
            return {name: float(value) for name, value in evaluator.result().items()}

        return run

    def predictions(self, path: str | None, stop_flag: Any) -> Iterator[Any]:
        """Yields the lines of the predictor; nothing if it writes its own output."""
        self._require("get_infer_state", "infer_step", "get_predictor")
        batches = ((None, batch) for batch in self._passes("pred"))
        inference = self._inference(self._flags.pred_batch_size)
        predictor = self._run.module.get_predictor(self._config)
        writes_itself = not isinstance(predictor, Predictor) or predictor.output_path is not None
        if writes_itself and self._flags.pred_output is not None:
            raise UsageError("--pred_output has no effect: the predictor writes its own output.")
        try:
            for _, results in inference.results(path, batches, stop_flag):
                if not writes_itself:
                    yield from predictor.lines(results)
                elif self._flags.dry_run:
                    yield results
                elif hosts.current().is_writer:
                    predictor.consume(results)
        except InterruptedError:
            return
        if not writes_itself:
            yield from predictor.last_lines()
        elif not self._flags.dry_run and hosts.current().is_writer:
            predictor.complete()

    def sample(self, kind: Kind) -> Any:
        if kind == "train":
            return next(iter(self.train_batches(seed=0)))
        batches = iter(self._passes(kind))
        return next(pairs(batches, "eval_data_fn"))[1] if kind == "eval" else next(batches)

    def inference(self, path: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self._require("get_infer_state", "infer_step")
        kind = "pred" if self._flags.eval_pattern is None else "eval"
        batch = self.sample(kind)
        return self._inference(batch_lib.n_rows(batch)).function(path), (batch,)

    def scales(self) -> Any:
        self._require("get_train_state", "train_step")
        training = OwnTraining(self._run.module, self._config, self._frozen, data=())
        return training.scales(self.sample("train"))

    def _inference(self, batch_size: int) -> Inference:
        if hosts.current().count > 1:
            # Every process evaluates all of the data.
            layout_lib.refuse_flags(self._flags, "each of several processes evaluates alone")
            layout = None
        else:
            layout = self._with_rules(self._data.layout)
        return Inference(
            self._run.module,
            self._config,
            self._frozen,
            batch_size=batch_size,
            layout=layout,
            choose_adapters=functools.partial(adapters_of, self._flags),
        )

    def _require(self, *names: str) -> None:
        for name in names:
            if not hasattr(self._run.module, name):
                raise UsageError(
                    f"{self._run.module.__name__} has no function {name}({_ARGUMENTS[name]}), "
                    f"which {self._mode} needs."
                )

    @property
    def config(self) -> Any:
        """What `load_config` returned, or the settings of the run."""
        return self._config

    @functools.cached_property
    def _config(self) -> Any:
        if self._loaded is not None:
            return self._loaded
        load = getattr(self._run.module, "load_config", None)
        if load is None:
            return self._run.settings
        try:
            config = load(flags_namespace(self._run, self._mode))
        except AssertionError as error:
            if not str(error):
                raise
            raise UsageError(f"{self._run.module.__name__} rejected its flags: {error}") from error
        if config is None:
            raise UsageError(
                f"load_config of {self._run.module.__name__} returned None, not the config."
            )
        return config

    @functools.cached_property
    def _frozen(self) -> Any:
        return freeze(self._config)

    def _open_source(self, kind: Kind, pattern: str) -> data.Source:
        """Opens the examples of a pattern with the model file's data function."""
        names = data.filenames(pattern)
        data_fn = getattr(self._config, f"{kind}_data_fn", None)
        if data_fn is None and kind == "eval":
            raise UsageError("load_config must set config.eval_data_fn: it returns (gold, batch).")
        n = self._data.n_examples(kind)
        open_data = functools.partial(
            data_fn or data.DataFn(), names, **({} if n < 0 else {"num_take": n})
        )
        examples = open_data()
        # An iterator can be read only once, so it is opened again for each pass.
        return data.as_source(open_data if isinstance(examples, Iterator) else examples)

    def _passes(self, kind: Kind, name: str = "") -> Reiterable:
        """Returns the data in order, as an iterable that starts over at every pass."""
        source, size = self._data.source(kind, name), self._data.batch_size(kind)
        return Reiterable(lambda: source.batches(size, epochs=1, remainder="keep"))


def flags_namespace(run: Run, mode: str) -> types.SimpleNamespace:
    """Returns all flags in the form `load_config` expects: patterns as lists, and the config."""
    flags = dict(vars(run.config))
    for name, value in flags.items():
        if name.endswith("_pattern") and value is not None:
            flags[name] = value.split(",")
    return types.SimpleNamespace(**{**flags, "mode": mode, "module_config": run.settings})


def freeze(config: Any) -> Any:
    """Returns the config for steps: `config.frozen`, a frozen copy, or the config itself."""
    frozen = getattr(config, "frozen", None)
    if frozen is None and isinstance(config, ml_collections.ConfigDict):
        frozen = ml_collections.FrozenConfigDict(config)
        with config.unlocked():
            config.frozen = frozen
    return config if frozen is None else frozen
