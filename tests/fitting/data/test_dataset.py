import numpy as np
import pytest

from tekoa import DataError
from tekoa.fitting.data import dataset, forms

X, Y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)


def test_ready_batches_stay_as_they_are_and_repeat():
    ready = [(X[:5], Y[:5]), (X[5:], Y[5:])]
    batches, n_batches = forms.as_dataset(ready).train_batches(
        batch_size=4, epochs=3, seed=0, shuffle=True
    )
    assert n_batches == 6
    starts = [int(y[0]) for _, y in batches]
    assert starts == [0, 5, 0, 5, 0, 5]


def test_a_generator_cannot_be_repeated():
    generator = ((X, Y) for _ in range(3))
    with pytest.raises(ValueError, match="epochs=2 needs data that can be read more than once"):
        forms.as_dataset(generator).train_batches(batch_size=4, epochs=2, seed=0, shuffle=False)


def test_a_pass_for_evaluation_keeps_order_and_the_last_rows():
    batches = forms.as_dataset((X, Y)).eval_batches(4)
    for _ in range(2):
        assert [len(batch["inputs"]) for batch in batches] == [4, 4, 2]


def test_a_single_row_is_refused_with_the_shape_of_training():
    train, row = forms.as_dataset((X, Y)), forms.as_dataset(X[0])
    with pytest.raises(DataError, match=r"must have shape \(rows, 2\).*as x\[None\]"):
        dataset.check_rank(train, row)


def test_only_inputs_drops_fields_that_the_model_does_not_receive():
    table = {"a": X[:, 0], "kind": np.array(list("xyxyxyxyxy"))}
    data = forms.as_dataset(table, targets="kind").only_inputs()
    assert list(next(iter(data.eval_batches(4)))) == ["a"]
