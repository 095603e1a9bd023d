import types

import pytest

from tekoa.core.sharding_mesh import LayoutError
from tekoa.estimator import cli, mesh
from tekoa.estimator import config as flags
from tekoa.models import transformer_lm


def run_of(*arguments):
    _, config = flags.parse(["train", "transformer_lm", *arguments])
    return types.SimpleNamespace(config=config, module=transformer_lm, settings=None)


def test_a_process_on_cpu_uses_one_device_unless_told_otherwise():
    assert mesh.layout_of(run_of()) is None


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--mesh=data=2,model=4"], {"data": 2, "fsdp": 1, "model": 4}),
        (["--mesh=fsdp=2"], {"data": 4, "fsdp": 2, "model": 1}),
        (["--num_partitions=4"], {"data": 2, "fsdp": 1, "model": 4}),
        (["--num_partitions=1"], {"data": 8, "fsdp": 1, "model": 1}),
        (["--model_parallel_submesh=2,2,1,1"], {"data": 2, "fsdp": 1, "model": 4}),
        (["--mesh=fsdp=2", "--num_partitions=2"], {"data": 2, "fsdp": 2, "model": 2}),
        (["--optimizer_rules=data"], {"data": 8, "fsdp": 1, "model": 1}),
    ],
)
def test_flags_give_a_mesh(arguments, sizes):
    layout = mesh.layout_of(run_of(*arguments))
    assert dict(layout.mesh.shape) == sizes
    assert tuple(layout.logical_axis_rules) == transformer_lm.LOGICAL_AXIS_RULES


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ("--mesh=data=16", LayoutError, "needs 16 devices, but there are 8"),
        ("--mesh=tensor=2", flags.UsageError, "got 'tensor=2'"),
        ("--mesh=model=two", flags.UsageError, "got 'model=two'"),
        ("--model_parallel_submesh=2,x", flags.UsageError, "such as 2,2,1,1, got '2,x'"),
        ("--optimizer_rules=kernel", LayoutError, "names the axis 'kernel'"),
        ("--sharding_rules=kernel:model;", flags.UsageError, "got 'kernel:model'"),
        ("--sharding_rules=kernel=a,b", LayoutError, "rules names the axis 'a'"),
    ],
)
def test_flags_that_do_not_fit_are_mistakes(argument, error, message):
    with pytest.raises(error, match=message):
        mesh.layout_of(run_of(argument))


def test_partitions_are_said_once():
    with pytest.raises(flags.UsageError, match="--mesh model=2 contradicts 4 partitions"):
        mesh.layout_of(run_of("--mesh=model=2", "--num_partitions=4"))


def test_rules_that_do_not_fit_a_parameter_end_the_command_in_one_message(capsys, tmp_path):
    arguments = ["train", "transformer_lm", f"--model_dir={tmp_path}", "--module_config.width=16"]
    code = cli.main([*arguments, "--mesh=model=4", "--sharding_rules=scale=-,model"])
    assert code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "norm/scale' has 2 entries" in line
    code = cli.main([*arguments, "--mesh=data=8", "--train_batch_size=12"])
    assert code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("tekoa: --train_batch_size: A batch of 12 rows does not divide")
