import os
import types

import pytest

from tekoa import data
from tekoa.estimator.cli import flags
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.jestimator.program import LongProgram
from tekoa.estimator.model_file import experiment, program
from tekoa.estimator.model_file.short import ShortProgram
from tekoa.estimator.run import run
from tekoa.loop.checkpoint import Summary


def run_with(*flag_list, **functions):
    _, parsed = flags.parse(list(flag_list))
    module = types.ModuleType("my_model")
    vars(module).update(functions)
    return run.Run(config=parsed, module=module, settings=None, model_dir=None)


def program_with(name):
    return program.program_of(run_with(**{name: lambda *args: None}), "train")


def test_a_file_with_an_experiment_is_short():
    assert isinstance(program_with("experiment"), ShortProgram)


@pytest.mark.parametrize("name", ["get_train_state", "get_infer_state"])
def test_a_file_with_states_is_long(name):
    assert isinstance(program_with(name), LongProgram)


def test_a_file_with_neither_is_rejected():
    with pytest.raises(UsageError, match=r"my_model is not a model file: .* experiment\(config"):
        program_with("get_config")


def program_data(*flag_list):
    opened = []

    def open_source(kind, pattern):
        opened.append((kind, pattern))
        return data.as_source([{"x": float(i)} for i in range(4)])

    return program.ProgramData(run_with(*flag_list), open_source), opened


def test_each_kind_of_data_is_opened_once():
    inputs, opened = program_data("--train_pattern=a", "--valid_pattern=b")
    for kind in ("train", "valid", "train", "valid"):
        inputs.source(kind)
    assert opened == [("train", "a"), ("valid", "b")]


def test_a_missing_pattern_is_named():
    with pytest.raises(UsageError, match="--eval_pattern"):
        program_data()[0].source("eval")


def test_two_streams_of_the_same_data_are_independent():
    inputs, opened = program_data("--train_pattern=a", "--train_batch_size=2")
    first, second = (inputs.train_batches(0, mark_first=False) for _ in range(2))
    assert next(first)["x"].tolist() == next(second)["x"].tolist() == [0, 1]
    assert len(opened) == 1


@pytest.mark.parametrize("mark_first", [False, True])
def test_batches_report_the_first_of_a_run_on_request(mark_first):
    inputs, _ = program_data("--train_pattern=a", "--train_batch_size=2", "--train_consecutive=2")
    batch = next(inputs.train_batches(0, mark_first=mark_first))
    assert ("is_first" in batch) == mark_first


MODEL_FILE = """
import os
import numpy as np
from tekoa import data

def shifted(example, rng):
    return {"x": example["x"] + rng.integers(100), "process": os.getpid()}

def open_data(config, pattern, *, train):
    return data.as_source({"x": np.arange(20)}).map_with_rng(shifted)

def experiment(config, facts):
    raise NotImplementedError
"""


def test_data_workers_call_functions_of_a_model_file(tmp_path):
    path = tmp_path / "model_with_workers.py"
    path.write_text(MODEL_FILE)
    module = experiment.load_module(str(path))

    def batches(n_workers):
        _, config = flags.parse(
            ["--train_pattern=x", "--train_batch_size=4", f"--data_workers={n_workers}"]
        )
        opened = run.Run(config=config, module=module, settings=None, model_dir=None)
        return program.program_of(opened, "train").train_batches(seed=1)

    own, others = batches(0), batches(1)
    for _ in range(6):
        expected, batch = next(own), next(others)
        assert batch["x"].tolist() == expected["x"].tolist()
        assert set(expected["process"]) == {os.getpid()} != set(batch["process"])
    others.close()


def test_a_set_does_not_replace_the_metrics_of_another():
    summary = Summary(step=0, state=None, metrics={"train": {"loss": 3.0}})
    summary = program.with_valid_metrics(summary, "", {"loss": 1.0, "noisy_loss": 2.0})
    assert summary.metrics["train"] == {"loss": 3.0, "valid_loss": 1.0, "valid_noisy_loss": 2.0}
    with pytest.raises(UsageError, match="Give the set noisy another name"):
        program.with_valid_metrics(summary, "noisy", {"loss": 1.0})
