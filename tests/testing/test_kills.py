import json
import math
import textwrap

import pytest

from tekoa import testing
from tekoa.testing import kill_worker, kills


def some_function(reader):
    return reader


MODULE = """
    import jax.numpy as jnp, numpy as np, optax
    from tekoa import TrainLoop, TrainTask

    DATA = [(np.full((4, 2), i % 5, np.float32), np.full(4, i, np.float32)) for i in range(40)]

    def make(reader, data):
        task = TrainTask(
            apply=lambda params, x: x @ params["w"],
            optimizer=optax.adam(0.1),
            loss=lambda out, y: jnp.mean((out - y) ** 2),
            data=data,
        )
        params = {"w": np.ones(2, np.float32)}
        return TrainLoop(reader(params), task, n_steps_per_checkpoint=4, n_steps=40)

    def exact(reader):
        return make(reader, DATA)

    def forgetful(reader):
        return make(reader, iter(DATA))

    def failing(reader):
        raise RuntimeError("the user's own mistake")
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(textwrap.dedent(MODULE))
    return path


@pytest.mark.parametrize(
    ("function", "path"),
    [
        ("my_module:make_loop", "my_module:make_loop"),
        (textwrap.dedent, "textwrap:dedent"),
        (lambda reader: reader, None),
        (math.sqrt, None),
    ],
)
def test_importable_functions_have_a_path(function, path):
    assert kills.import_path(function) == path


def test_a_function_in_a_file_has_a_path():
    path = kills.import_path(some_function)
    assert kill_worker.import_function(path).__code__ == some_function.__code__


def test_a_local_function_is_an_error():
    def local(reader):
        return reader

    with pytest.raises(ValueError, match="top level of a module or file"):
        kills.check_kills(local)


def test_the_first_difference_is_reported():
    same = {"w": "1", "v": "2"}
    expected = {4: same, 8: same, 12: same}
    actual = {8: same, 10: {"w": "9", "v": "9"}, 12: {"w": "1", "v": "3"}}
    with pytest.raises(AssertionError, match=r"from step 8 differs at step 12\. Leaf 'v'"):
        kills._compare(expected, actual, 8)


def test_incomplete_lines_are_ignored(tmp_path):
    line = json.dumps({"step": 2, "start": 0, "digests": {"w": "1"}})
    (tmp_path / "notes").write_text(f"\n{line}\n{line[:9]}\n{line}\n")
    assert [line["step"] for line in kills._lines(tmp_path / "notes")] == [2, 2]
    assert list(kills._lines(tmp_path / "none")) == []


@pytest.mark.slow
def test_an_exact_loop_passes(module):
    report = kills.check_kills(f"{module}:exact", n_kills=2)
    assert (report.n_killed, report.n_stopped, len(report.resumed_from)) == (1, 1, 3)


@pytest.mark.slow
def test_data_without_a_position_is_detected_with_step_and_leaf(module):
    with pytest.raises(AssertionError, match=r"resumed from step \d+ differs at step \d+\. Leaf '"):
        testing.check_resume(f"{module}:forgetful", n_kills=3)


@pytest.mark.slow
def test_errors_of_the_function_are_reported(module):
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        testing.check_resume(f"{module}:failing")
