import types

import pytest

from tekoa.estimator import config, program, run
from tekoa.estimator.config import UsageError
from tekoa.estimator.long import LongProgram
from tekoa.estimator.short import ShortProgram


def program_with(*names):
    _, parsed = config.parse([])
    made = types.ModuleType("made")
    vars(made).update({name: lambda *args: None for name in names})
    opened = run.Run(config=parsed, module=made, settings=None, model_dir=None)
    return program.program_of(opened, "train")


def test_a_file_with_an_experiment_is_short():
    assert isinstance(program_with("experiment"), ShortProgram)


@pytest.mark.parametrize("name", ["get_train_state", "get_infer_state"])
def test_a_file_with_states_is_long(name):
    assert isinstance(program_with(name), LongProgram)


def test_a_file_with_neither_is_no_model():
    with pytest.raises(UsageError, match=r"made is no model: .* experiment\(config, data\)"):
        program_with("get_config")
