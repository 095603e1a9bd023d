"""Code that every ejected file of a kind has."""

import ast

from tekoa.estimator.eject import pieces


def test_code_is_python():
    for text in (
        pieces.TRAIN_STATE,
        pieces.MEAN_METRICS,
        pieces.long_training(changes_optimizer=True),
    ):
        ast.parse(text)
    code = pieces.amos({"w": (0.5, ())}, by_slabs=True, has_momentum=True)
    assert "momentum=None" in code
    assert "by_slabs" not in code
    ast.parse(code)


def test_size_of_a_step_has_the_numbers_of_the_run():
    variables = {"n_steps": 100, "n_warmup": 5, "peak": 0.05, "tail": "constant"}
    code = pieces.step_size(variables)
    assert "return 0.05 * rise\n" in f"{code}\n"
    assert "/ 96" in code
