import numpy as np

from tekoa import data


def xs(source, **options):
    options = {"epochs": 1, "remainder": "keep", **options}
    return [int(x) for batch in source.batches(4, **options) for x in batch["x"]]


def open_range(filenames):
    return {"x": np.arange(len(filenames) * 5)}


def test_a_data_function_has_the_original_form():
    fn = data.DataFn(open_range)
    assert xs(fn(["a", "b"])) == list(range(10))
    assert xs(fn(["a", "b"], 2, 1)) == [1, 3, 5, 7, 9]
    assert xs(fn(["a"], epochs=2)) == [*range(5), *range(5)]
    assert xs(fn(["a", "b"], num_take=3)) == [0, 1, 2]
    assert xs(fn(["a", "b"], shard_num=2, shard_index=0, epochs=2, num_take=5)) == [
        0,
        2,
        4,
        0,
        2,
        4,
    ]


def test_epochs_without_end():
    batches = data.DataFn(open_range)(["a"], epochs=None).batches(4, epochs=1)
    assert batches.n_batches is None
    assert [next(batches)["x"][0] for _ in range(5)] == [0, 4, 3, 2, 1]


def test_features_are_made_of_examples():
    fn = data.DataFn(open_range, lambda example: {"x": example["x"] * 10})
    assert xs(fn(["a"], num_take=2)) == [0, 10]


def test_patterns_are_opened_by_default():
    assert len(data.DataFn()("digits://split=test", num_take=7)) == 7


def test_streams_are_sharded_too():
    fn = data.DataFn(lambda names: lambda: ({"x": at} for at in range(10)))
    assert xs(fn(["a"], 3, 1, epochs=2)) == [1, 4, 7, 1, 4, 7]


def test_no_files_mean_dummy_data():
    assert len(data.DataFn()([])) == 0
