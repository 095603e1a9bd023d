import types

import pytest

from tekoa.estimator.cli import flags, main
from tekoa.estimator.run import layout as layout_lib
from tekoa.models import transformer_lm
from tekoa.sharding.mesh import LayoutError


def run_of(*arguments):
    _, config = flags.parse(["train", "transformer_lm", *arguments])
    return types.SimpleNamespace(config=config, module=transformer_lm, settings=None)


def test_a_process_on_cpu_uses_one_device_by_default():
    assert layout_lib.layout_of(run_of()) is None


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--mesh=data=2,model=4"], {"data": 2, "fsdp": 1, "model": 4}),
        (["--mesh=fsdp=2"], {"data": 4, "fsdp": 2, "model": 1}),
        (["--num_partitions=4"], {"data": 2, "fsdp": 1, "model": 4}),
        (["--num_partitions=1"], {"data": 8, "fsdp": 1, "model": 1}),
        (["--model_parallel_submesh=2,2,1,1"], {"data": 2, "fsdp": 1, "model": 4}),
        (["--model_parallel_submesh=(2,2,1,1)"], {"data": 2, "fsdp": 1, "model": 4}),
        (["--model_parallel_submesh=(2,)"], {"data": 4, "fsdp": 1, "model": 2}),
        (["--mesh=fsdp=2", "--num_partitions=2"], {"data": 2, "fsdp": 2, "model": 2}),
        (["--optimizer_rules=data"], {"data": 8, "fsdp": 1, "model": 1}),
    ],
)
def test_flags_define_the_mesh(arguments, sizes):
    layout = layout_lib.layout_of(run_of(*arguments))
    assert dict(layout.mesh.shape) == sizes
    assert tuple(layout.logical_axis_rules) == transformer_lm.LOGICAL_AXIS_RULES


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ("--mesh=data=16", LayoutError, "needs 16 devices, but there are 8"),
        ("--mesh=tensor=2", flags.UsageError, "got 'tensor=2'"),
        ("--mesh=model=two", flags.UsageError, "got 'model=two'"),
        ("--mesh=model=²", flags.UsageError, "got 'model=²'"),
        ("--model_parallel_submesh=2,²", flags.UsageError, "got '2,²'"),
        ("--model_parallel_submesh=2,x", flags.UsageError, r"\(2,2,1,1\), got '2,x'"),
        ("--model_parallel_submesh=(2,2", flags.UsageError, r"got '\(2,2'"),
        ("--optimizer_rules=kernel", LayoutError, "names the axis 'kernel'"),
        ("--sharding_rules=kernel:model;", flags.UsageError, "got 'kernel:model'"),
        ("--sharding_rules=kernel=a,b", LayoutError, "rules names the axis 'a'"),
    ],
)
def test_wrong_flags_are_reported(argument, error, message):
    with pytest.raises(error, match=message):
        layout_lib.layout_of(run_of(argument))


def test_contradicting_flags_are_rejected():
    with pytest.raises(flags.UsageError, match="--mesh model=2 contradicts 4 partitions"):
        layout_lib.layout_of(run_of("--mesh=model=2", "--num_partitions=4"))


def test_layout_errors_end_the_command_with_one_message(capsys, tmp_path):
    arguments = ["train", "transformer_lm", f"--model_dir={tmp_path}", "--module_config.width=16"]
    code = main.main([*arguments, "--mesh=model=4", "--sharding_rules=scale=-,model"])
    assert code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "norm/scale' has 2 entries" in line
    code = main.main([*arguments, "--mesh=data=8", "--train_batch_size=12"])
    assert code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("tekoa: --train_batch_size: A batch of 12 rows cannot be split")


def test_a_layout_that_cannot_be_used_is_refused_with_its_flags():
    layout_lib.refuse_flags(run_of("--model_dir=a").config, "reason")
    with pytest.raises(flags.UsageError, match=r"--mesh, --num_partitions cannot be used"):
        layout_lib.refuse_flags(run_of("--mesh=data=2", "--num_partitions=2").config, "reason")
