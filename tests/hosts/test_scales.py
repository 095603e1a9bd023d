"""Every process reads other rows, but all use the scales that process 0 has found."""

import json

import pytest

from support.processes import TINY_MODEL

pytestmark = pytest.mark.slow

# The tiny model with an optimizer that writes its scales to a file in every process.
REPORTING = f"""
import dataclasses
import importlib.util
import json
import pathlib

import jax

from tekoa.optim import NamedOptimizer

spec = importlib.util.spec_from_file_location("tiny", {str(TINY_MODEL)!r})
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
get_config, open_data = tiny.get_config, tiny.open_data
DEFAULTS, ALWAYS = getattr(tiny, "DEFAULTS", {{}}), getattr(tiny, "ALWAYS", {{}})


class Reporting(NamedOptimizer):
    def resolve(self, find_table, **options):
        line = super().resolve(find_table, **options)
        path = pathlib.Path(__file__).with_name(f"{{jax.process_index()}}.json")
        path.write_text(json.dumps(self.facts["eta"]))
        return line


def experiment(config, data):
    return dataclasses.replace(tiny.experiment(config, data), optimizer=Reporting("auto"))
"""


def test_all_processes_use_the_scales_of_process_0(pair, tmp_path):
    model = tmp_path / "reporting.py"
    model.write_text(REPORTING)
    commands = pair("train", model, "--max_train_steps=2", f"--model_dir={tmp_path / 'run'}")
    for command in commands:
        assert command.wait()[0] == 0, command.output()
    scales = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]
    assert scales[0]["Dense_0/kernel"] > 0
    assert scales[0] == scales[1]
