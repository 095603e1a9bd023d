import types

from tekoa.estimator import config, program, run
from tekoa.estimator.short import ShortProgram


def opened(**functions):
    _, parsed = config.parse([])
    made = types.ModuleType("made")
    vars(made).update(functions)
    return run.Run(config=parsed, module=made, settings=None, model_dir=None)


def test_a_file_with_an_experiment_is_short():
    found = program.program_of(opened(experiment=lambda settings, facts: None), "train")
    assert isinstance(found, ShortProgram)
