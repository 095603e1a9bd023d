import numpy as np
import pytest

from tekoa.estimator import Evaluator


def accuracy(gold, found):
    return np.mean(np.asarray(gold) == np.asarray(found))


def test_scores_are_over_all_batches():
    evaluator = Evaluator({"accuracy": (lambda logits: logits.argmax(-1), accuracy)})
    for _ in range(2):  # A second evaluation starts anew.
        evaluator.reset_states()
        evaluator.update_state(np.array([0, 1]), np.array([[2, 1], [2, 1]]))
        evaluator.update_state(np.array([1]), np.array([[0, 1]]))
        assert evaluator.result() == {"accuracy": pytest.approx(2 / 3)}


def test_a_result_that_is_not_by_row_is_refused():
    evaluator = Evaluator({"mean": (lambda found: [found.mean()], accuracy)})
    evaluator.update_state(np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="'mean' has 1 values for 3 examples"):
        evaluator.result()
