import numpy as np
import pytest

from tekoa import DataError
from tekoa.data import Source, as_source
from tekoa.data.readers.memory import ArrayReader
from tekoa.fitting.data import classes, forms


def test_fields_of_text_are_numbered_in_alphabetical_order():
    source, names = classes.encode_classes(as_source({"y": np.array(["b", "a"])}), "y", None)
    assert names == ["a", "b"]
    assert [int(example["y"]) for example in source] == [1, 0]


def test_arrays_of_text_are_numbered_too():
    x, names = np.zeros((3, 2), np.float32), np.array(["oak", "ash", "elm"])
    dataset = forms.as_dataset((x, names))
    assert dataset.classes == ["ash", "elm", "oak"]
    (_, (targets,)) = dataset.split(next(iter(dataset.eval_batches(3))))
    np.testing.assert_array_equal(targets, [2, 0, 1])
    with pytest.raises(DataError, match="has the classes fir, which the training data does not"):
        forms.as_dataset((x, np.array(["fir", "ash", "elm"])), classes=dataset.classes)


def test_data_that_names_its_classes_is_numbered_as_the_training_data():
    """As with folders of images, of which validation may have fewer."""
    reader = ArrayReader({"label": np.array([0, 1, 1])}, "folders", facts={"classes": ["b", "c"]})
    source, names = classes.encode_classes(Source(reader), "label", ["a", "b", "c"])
    assert names == ["a", "b", "c"]
    assert [int(example["label"]) for example in source] == [1, 2, 2]


def test_text_targets_become_class_numbers(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("size,kind\n1,pear\n2,apple\n3,pear\n4,fig\n")
    dataset = forms.as_dataset(str(path), targets="kind")
    assert dataset.classes == ["apple", "fig", "pear"]
    (_, (targets,)) = dataset.split(next(iter(dataset.eval_batches(4))))
    np.testing.assert_array_equal(targets, [2, 0, 2, 1])
    other = {"size": np.ones(1), "kind": np.array(["plum"], object)}
    with pytest.raises(DataError, match="classes plum, which the training data does not have"):
        forms.as_dataset(other, targets="kind", classes=dataset.classes)
