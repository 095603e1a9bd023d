import numpy as np
import pytest

from tekoa import DataError
from tekoa.data import as_source
from tekoa.fitting.data import forms

X, Y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)


def first_batch(dataset, **options):
    settings = {"batch_size": 4, "epochs": 1, "seed": 0, "shuffle": False, **options}
    batches, n_batches = dataset.train_batches(**settings)
    return dataset.split(next(iter(batches))), n_batches


def assert_rows(batch, x, y):
    (input_,), targets = batch
    np.testing.assert_array_equal(input_, x)
    np.testing.assert_array_equal(targets, (y,))


def test_a_pair_of_arrays_becomes_batches():
    batch, n_batches = first_batch(forms.as_dataset((X, Y)))
    assert_rows(batch, X[:4], Y[:4])
    assert n_batches == 2
    assert first_batch(forms.as_dataset((X, Y)), epochs=5)[1] == 12
    assert first_batch(forms.as_dataset((X, Y)), epochs=None)[1] is None


def test_trees_of_arrays_keep_their_structure():
    dataset = forms.as_dataset(({"a": X, "b": X + 1}, (Y, -Y)))
    ((tree,), targets), _ = first_batch(dataset)
    np.testing.assert_array_equal(tree["b"], X[:4] + 1)
    np.testing.assert_array_equal(targets[1], -Y[:4])


def test_an_array_alone_is_inputs_without_targets():
    (input_,), targets = first_batch(forms.as_dataset(X))[0]
    np.testing.assert_array_equal(input_, X[:4])
    assert targets == ()


def test_usual_names_are_recognised_and_others_can_be_named():
    assert_rows(first_batch(forms.as_dataset({"image": X, "label": Y}))[0], X[:4], Y[:4])
    named = forms.as_dataset({"p": X, "q": Y}, inputs="p", targets="q")
    assert_rows(first_batch(named)[0], X[:4], Y[:4])
    dataset = forms.as_dataset({"p": X, "q": Y})
    assert sorted(dataset.split({"p": X, "q": Y})[0][0]) == ["p", "q"]  # The whole dict.
    with pytest.raises(DataError, match=r"no field 'r'. It has p, q"):
        forms.as_dataset({"p": X, "q": Y}, targets="r")


def test_columns_of_numbers_become_one_matrix():
    table = {"width": X[:, 0], "height": X[:, 1], "kind": Y}
    dataset = forms.as_dataset(table, targets="kind")
    assert_rows(first_batch(dataset)[0], X[:4], Y[:4])


def test_text_is_no_input(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("name,size,kind\na,1,0\nb,2,1\n")
    with pytest.raises(DataError, match=r"\['name'\] hold text.*such as inputs=\['size'\]"):
        forms.as_dataset(str(path), targets="kind")


def test_text_that_is_neither_input_nor_target_is_left_out(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("name,size,kind\na,1,pear\nb,2,apple\n")
    dataset = forms.as_dataset(str(path), inputs=["size"], targets="kind")
    batches, _ = dataset.train_batches(batch_size=2, epochs=1, seed=0, shuffle=False)
    batch = next(iter(batches))
    assert batch.keys() == {"size", "kind"}
    np.testing.assert_array_equal(batch["kind"], [1, 0])


def test_a_data_frame_is_a_table_of_columns():
    import pandas

    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "kind": Y})
    assert_rows(first_batch(forms.as_dataset(frame, targets="kind"))[0], X[:4], Y[:4])


def test_examples_of_a_dataset_are_batched():
    dataset = forms.as_dataset(as_source([(X[i], Y[i]) for i in range(10)]))
    assert_rows(first_batch(dataset)[0], X[:4], Y[:4])


def test_something_else_is_refused():
    with pytest.raises(TypeError, match=r"data must be arrays, a pattern.*got int"):
        forms.as_dataset(3)


def test_a_mistyped_or_missing_target_is_named():
    table = {"a": np.arange(4.0), "kind": np.array(["x", "y", "x", "y"])}
    with pytest.raises(DataError, match=r"no field 'kid'. Did you mean 'kind'\? It has a, kind"):
        forms.as_dataset(table, targets="kid")
    with pytest.raises(DataError, match=r"Name the one to predict, such as targets='kind'"):
        forms.as_dataset(table)


def test_a_list_of_names_is_a_matrix_also_if_it_has_one_name():
    table = {"width": X[:, 0], "kind": Y}
    for options in ({"inputs": ["width"], "targets": "kind"}, {"targets": "kind"}):
        assert_rows(first_batch(forms.as_dataset(table, **options))[0], X[:4, :1], Y[:4])


def test_a_pair_of_frames_is_a_pair_of_arrays():
    import pandas

    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "name": list("abcdefghij"), "kind": Y})
    pair = (frame[["a", "b"]], frame["kind"])
    assert_rows(first_batch(forms.as_dataset(pair))[0], X[:4], Y[:4])
    with pytest.raises(DataError, match="columns name hold no numbers"):
        forms.as_dataset((frame[["a", "name"]], frame["kind"]))


@pytest.mark.parametrize("make", [lambda x, y: (x, y), lambda x, y: {"x": x, "y": int(y)}])
def test_a_list_of_examples_is_batched(make):
    examples = [make(x, y) for x, y in zip(X, Y, strict=True)]
    assert_rows(first_batch(forms.as_dataset(examples))[0], X[:4], Y[:4])
