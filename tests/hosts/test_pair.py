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
def split(run, home):
    """The same run of two processes with two devices each, the weights split over all."""
    directory = home / "together"
    mesh = ["--mesh=fsdp=4", "--sharding_rules=fsdp"]
    two = ["launch", "--processes=2", "--devices=2"]
    output = run(*two, *TRAIN, f"--model_dir={directory}", *mesh)
    assert not re.search(r"^\[1\]", output, re.MULTILINE), output
    return directory


def test_losses_and_order_are_those_of_one_process(points, alone, split):
    expected, actual = points(alone / "train"), points(split / "train")
    timing = {key for key in expected if "seconds" in key[0] or key[0].startswith("system/")}
    assert actual.keys() == expected.keys()
    for key in expected.keys() - timing:
        assert actual[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), key


def test_each_example_comes_once_per_epoch(points, split):
    """A check every 5 steps of 12 rows is an epoch of 60 examples."""
    curves = points(split / "train")
    numbers = np.arange(N_EXAMPLES)
    for step in range(5, 45, 5):
        assert curves["train/number", step] == pytest.approx(numbers.mean())
        assert curves["train/number_squared", step] == pytest.approx((numbers**2).mean())


def test_states_are_those_of_one_process(assert_close, alone, split):
    assert paths.list_steps(split) == paths.list_steps(alone) == list(range(0, 45, 5))
    for step in (0, 40):
        assert_close(split, alone, step)


def test_one_process_wrote_points_and_notes(split):
    assert len(list((split / "train").glob("events*"))) == 1
    assert not list(split.glob("*tmp*"))
    assert not (split / "writer.lease").exists()


def test_each_process_wrote_its_part(split):
    parts = paths.step_dir(split, 40) / "default"
    assert sorted(path.name for path in parts.glob("ocdbt.process_*")) == [
        "ocdbt.process_0",
        "ocdbt.process_1",
    ]


def test_evaluation_is_that_of_one_process_to_the_last_example(run, alone, split):
    two = ["launch", "--processes=2", "--devices=2"]
    for mode in ("eval", "eval_wait"):
        flags = [TINY_MODEL, f"--model_dir={split}", "--json"]
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


def test_predictions_are_in_order_and_complete(run, split, home):
    outs = [home / "one.txt", home / "two.txt"]
    flags = ["predict", TINY_MODEL, f"--model_dir={split}"]
    run(*flags, f"--pred_output={outs[0]}")
    run("launch", "--processes=2", "--devices=2", *flags, f"--pred_output={outs[1]}")
    one, two = (out.read_text() for out in outs)
    assert one == two
    assert len(one.splitlines()) == N_HELD_OUT
