import re

import jax
import pytest

from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.modes import plan

SMALL = [
    "plan",
    "transformer_lm",
    "--module_config.n_layers=1",
    "--module_config.width=16",
    "--module_config.mlp_ratio=2",
]


def run_plan(capsys, *arguments):
    code = main.main([*SMALL, *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_mesh_larger_than_this_machine_is_planned_from_shapes(capsys):
    code, out, _ = run_plan(capsys, "--mesh=data=4,fsdp=4,model=4", "--train_batch_size=64")
    assert code == 0
    assert out.startswith(
        "Mesh: data=4, fsdp=4, model=4 (64 devices). Batch: 64 rows, split into 16 parts."
    )
    assert "estimated from the traced step" in out
    assert re.search(r"attention_\*/out +float32\[4,4,16\] +model, -, fsdp\n", out)
    # 67 * 16 for the table, 4 * 16 * 16 in attention, 3 * 16 * 32 in the MLP, 3 norms of 16.
    n = 67 * 16 + 4 * 256 + 3 * 512 + 3 * 16
    per_device = 67 * 16 // 4 + 4 * 256 // 16 + 3 * 512 // 16 + 3 * 16 // 4
    row = f"parameters {plan.bytes_text(4 * n)} {plan.bytes_text(4 * per_device)}"
    assert row in re.sub(r" +", " ", out)


def test_a_training_that_does_not_fit_is_refused_with_advice(capsys):
    large = ["--mesh=data=16", "--train_batch_size=64", "--module_config.seq_length=128"]
    code, _, err = run_plan(capsys, *large, "--device_memory=2.5MB")
    assert code == 2
    assert re.match(
        r"tekoa: Out of memory: a device needs [\d.]+ MB but has 2.50 MB. "
        r"--accumulate=2 would need about [\d.]+ MB\.\n",
        err,
    )
    code, _, err = run_plan(capsys, *large, "--device_memory=10KB")
    assert code == 2
    assert "State and gradients alone need" in err


@pytest.mark.slow
def test_a_mesh_that_fits_this_machine_is_compiled(capsys):
    code, out, _ = run_plan(
        capsys, "--mesh=fsdp=2", "--train_batch_size=8", "--optimizer_rules=data"
    )
    assert len(jax.devices()) == 8
    assert code == 0
    assert "taken from the compiled step" in out
    rows = dict(re.findall(r"^(parameters|optimizer state) .* ([\d.]+) KB$", out, re.MULTILINE))
    assert float(rows["optimizer state"]) < float(rows["parameters"])


def test_a_batch_that_cannot_be_split_evenly_is_a_usage_error(capsys):
    code, _, err = run_plan(capsys, "--mesh=data=64", "--train_batch_size=32")
    assert code == 2
    assert "32 rows cannot be split into 64 equal parts" in err


@pytest.mark.parametrize("text", ["much", "1.2.3GB", "16 parsecs", ".", "16²GB"])
def test_an_invalid_size_is_a_usage_error(text):
    with pytest.raises(UsageError, match="--device_memory"):
        plan.parse_bytes(text)
