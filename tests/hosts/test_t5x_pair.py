"""T5X checkpoints of a model that is split over two processes."""

import json
import shutil

import pytest

from support.processes import TINY_MODEL, TRAIN
from tekoa.store.commit import paths

pytestmark = pytest.mark.slow

TWO = ["launch", "--processes=2", "--devices=2"]
SPLIT = ["--mesh=fsdp=4", "--sharding_rules=fsdp", "--checkpoint_format=t5x"]


@pytest.fixture(scope="module")
def half(run, home):
    """Twenty of forty steps by two processes, with the weights split over all devices."""
    directory = home / "half"
    run(*TWO, *TRAIN, "--max_train_steps=20", f"--model_dir={directory}", *SPLIT)
    return directory


def test_each_process_wrote_its_shards(half):
    step = paths.step_dir(half, 20)
    assert (step / "checkpoint").is_file()
    arrays = [path.parent for path in step.glob("target.*/.zarray")]
    assert arrays
    n_chunks = [
        len([path for path in array.iterdir() if not path.name.startswith(".")]) for array in arrays
    ]
    assert max(n_chunks) == 4


def test_two_processes_resume_it(run, home, half, alone, assert_close):
    directory = shutil.copytree(half, home / "by_two")
    output = run(*TWO, *TRAIN, f"--model_dir={directory}", *SPLIT)
    assert "Resuming from step 20." in output
    assert_close(directory, alone, 40)


def test_one_process_resumes_it(run, home, half, alone, assert_close):
    directory = shutil.copytree(half, home / "by_one")
    flags = ["--mesh=data=4", "--checkpoint_format=t5x"]
    run(*TRAIN, f"--model_dir={directory}", *flags, JAX_NUM_CPU_DEVICES="4")
    assert_close(directory, alone, 40)


def test_it_is_evaluated_by_one_process_and_by_two(run, half):
    flags = ["eval", TINY_MODEL, f"--model_dir={half}", "--json"]
    of_one, of_two = (
        json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        for output in (run(*flags), run(*TWO, *flags))
    )
    assert of_one["step"] == 20
    assert of_two == pytest.approx(of_one, rel=1e-6)
