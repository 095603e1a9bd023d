"""Two processes do what one does: all modes, the same numbers, one writer."""

import json
import pathlib
import re

import numpy as np
import pytest

from tekoa.store import names

pytestmark = pytest.mark.slow

TINY = pathlib.Path(__file__).parent / "programs" / "tiny.py"
N_EXAMPLES, N_HELD_OUT, N_PER_BATCH = 60, 53, 12


@pytest.fixture(scope="module")
def together(run, home):
    """The same run of two processes with two devices each, the weights split over all."""
    directory = home / "together"
    split = ["--mesh=fsdp=4", "--sharding_rules=fsdp"]
    two = ["launch", "--processes=2", "--devices=2"]
    said = run(*two, "train", TINY, f"--model_dir={directory}", *split)
    assert not re.search(r"^\[1\]", said, re.MULTILINE), said
    return directory


def test_losses_and_order_are_those_of_one_process(points, alone, together):
    expected, found = points(alone / "train"), points(together / "train")
    timing = {key for key in expected if "seconds" in key[0]}
    assert found.keys() == expected.keys()
    for key in expected.keys() - timing:
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), key


def test_each_example_comes_once_per_epoch(points, together):
    """A check every 5 steps of 12 rows is an epoch of 60 examples."""
    found = points(together / "train")
    numbers = np.arange(N_EXAMPLES)
    for step in range(5, 45, 5):
        assert found["train/number", step] == pytest.approx(numbers.mean())
        assert found["train/number_squared", step] == pytest.approx((numbers**2).mean())


def test_states_are_those_of_one_process(assert_close, alone, together):
    assert names.list_steps(together) == names.list_steps(alone) == list(range(0, 45, 5))
    for step in (0, 40):
        assert_close(together, alone, step)


def test_one_process_wrote_points_and_notes(together):
    assert len(list((together / "train").glob("events*"))) == 1
    assert not list(together.glob("*tmp*"))
    assert not (together / "writer.lease").exists()


def test_each_process_wrote_its_part(together):
    parts = names.step_dir(together, 40) / "default"
    assert sorted(path.name for path in parts.glob("ocdbt.process_*")) == [
        "ocdbt.process_0",
        "ocdbt.process_1",
    ]


def test_evaluation_is_that_of_one_process_to_the_last_example(run, alone, together):
    two = ["launch", "--processes=2", "--devices=2"]
    for mode in ("eval", "eval_wait"):
        flags = [TINY, f"--model_dir={together}", "--json", f"--eval_label={mode}"]
        one_said, two_said = run(mode, *flags), run(*two, mode, *flags, f"--eval_label={mode}_two")
        assert json_lines(one_said) == json_lines(two_said)
        assert len(json_lines(one_said)) == (1 if mode == "eval" else 9)
    # The parts of 53 examples: a mean over rows counted twice would not be one of them.
    accuracy = [line["accuracy"] * N_HELD_OUT for line in json_lines(two_said)]
    assert accuracy == pytest.approx(np.round(accuracy), abs=1e-4)


def json_lines(said):
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_predictions_are_in_order_and_complete(run, together, home):
    outs = [home / "one.txt", home / "two.txt"]
    flags = ["predict", TINY, f"--model_dir={together}"]
    run(*flags, f"--pred_output={outs[0]}")
    run("launch", "--processes=2", "--devices=2", *flags, f"--pred_output={outs[1]}")
    one, two = (out.read_text() for out in outs)
    assert one == two
    assert len(one.splitlines()) == N_HELD_OUT
