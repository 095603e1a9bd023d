"""Two processes do what one does: all modes, the same numbers, one writer."""

import json
import re

import numpy as np
import pytest

from support.processes import TINY_MODEL, TRAIN
from support.tiny_model import N_EXAMPLES, N_HELD_OUT
from tekoa.store.commit import paths

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def together(run, home):
    """The same run of two processes with two devices each, the weights split over all."""
    directory = home / "together"
    split = ["--mesh=fsdp=4", "--sharding_rules=fsdp"]
    two = ["launch", "--processes=2", "--devices=2"]
    output = run(*two, *TRAIN, f"--model_dir={directory}", *split)
    assert not re.search(r"^\[1\]", output, re.MULTILINE), output
    return directory


def test_losses_and_order_are_those_of_one_process(points, alone, together):
    expected, actual = points(alone / "train"), points(together / "train")
    timing = {key for key in expected if "seconds" in key[0]}
    assert actual.keys() == expected.keys()
    for key in expected.keys() - timing:
        assert actual[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), key


def test_each_example_comes_once_per_epoch(points, together):
    """A check every 5 steps of 12 rows is an epoch of 60 examples."""
    curves = points(together / "train")
    numbers = np.arange(N_EXAMPLES)
    for step in range(5, 45, 5):
        assert curves["train/number", step] == pytest.approx(numbers.mean())
        assert curves["train/number_squared", step] == pytest.approx((numbers**2).mean())


def test_states_are_those_of_one_process(assert_close, alone, together):
    assert paths.list_steps(together) == paths.list_steps(alone) == list(range(0, 45, 5))
    for step in (0, 40):
        assert_close(together, alone, step)


def test_one_process_wrote_points_and_notes(together):
    assert len(list((together / "train").glob("events*"))) == 1
    assert not list(together.glob("*tmp*"))
    assert not (together / "writer.lease").exists()


def test_each_process_wrote_its_part(together):
    parts = paths.step_dir(together, 40) / "default"
    assert sorted(path.name for path in parts.glob("ocdbt.process_*")) == [
        "ocdbt.process_0",
        "ocdbt.process_1",
    ]


def test_evaluation_is_that_of_one_process_to_the_last_example(run, alone, together):
    two = ["launch", "--processes=2", "--devices=2"]
    for mode in ("eval", "eval_wait"):
        flags = [TINY_MODEL, f"--model_dir={together}", "--json"]
        labels = (["--eval_label=one"], ["--eval_label=two"]) if mode == "eval_wait" else ([], [])
        of_one, of_two = run(mode, *flags, *labels[0]), run(*two, mode, *flags, *labels[1])
        # The order of a sum of costs differs; counts do not.
        expected = [pytest.approx(line, rel=1e-6) for line in json_lines(of_one)]
        assert json_lines(of_two) == expected
        assert len(json_lines(of_one)) == (1 if mode == "eval" else 9)
    # Multiples of 1/53: the mean would not be one if some examples counted twice.
    accuracy = [line["accuracy"] * N_HELD_OUT for line in json_lines(of_two)]
    assert accuracy == pytest.approx(np.round(accuracy), abs=1e-4)


def json_lines(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_predictions_are_in_order_and_complete(run, together, home):
    outs = [home / "one.txt", home / "two.txt"]
    flags = ["predict", TINY_MODEL, f"--model_dir={together}"]
    run(*flags, f"--pred_output={outs[0]}")
    run("launch", "--processes=2", "--devices=2", *flags, f"--pred_output={outs[1]}")
    one, two = (out.read_text() for out in outs)
    assert one == two
    assert len(one.splitlines()) == N_HELD_OUT
