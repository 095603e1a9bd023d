import gzip

import numpy as np
import pytest

from tekoa import data
from tekoa.data.readers.base import RowRequest


def xs(source, **options):
    options = {"epochs": 1, "remainder": "keep", **options}
    return [int(x) for batch in source.batches(4, **options) for x in batch["x"]]


def open_range(filenames):
    return {"x": np.arange(len(filenames) * 5)}


def test_data_function_has_the_signature_of_jestimator():
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


def test_epochs_none_repeats_forever():
    batches = data.DataFn(open_range)(["a"], epochs=None).batches(4, epochs=1)
    assert batches.n_batches is None
    assert [next(batches)["x"][0] for _ in range(5)] == [0, 4, 3, 2, 1]


def test_feature_fn_is_applied_to_examples():
    fn = data.DataFn(open_range, lambda example: {"x": example["x"] * 10})
    assert xs(fn(["a"], num_take=2)) == [0, 10]


def test_data_fn_opens_patterns_by_default():
    assert len(data.DataFn()("digits://split=test", num_take=7)) == 7


def test_streams_can_be_sharded():
    fn = data.DataFn(lambda names: lambda: ({"x": at} for at in range(10)))
    assert xs(fn(["a"], 3, 1, epochs=2)) == [1, 4, 7, 1, 4, 7]


def test_no_files_is_dummy_data():
    assert len(data.DataFn()([])) == 0


SIZES = {"a": 3, "b": 1}


def open_one(name):
    return [{"name": name, "row": i} for i in range(SIZES[name])]


def names_and_rows(source):
    return [(str(example["name"]), int(example["row"])) for example in source]


def test_records_of_files_follow_one_another():
    fn = data.rec_data(open_one)
    assert names_and_rows(fn(["a", "b"])) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert names_and_rows(fn(["a", "b"], shard_num=2, shard_index=1)) == [("a", 1), ("b", 0)]
    assert names_and_rows(fn(["a", "b"], num_take=2)) == [("a", 0), ("a", 1)]


def test_records_of_files_are_interleaved():
    fn = data.rec_data(open_one, interleave=True)
    assert names_and_rows(fn(["a", "b"])) == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    batches = fn(["a", "b"]).batches(3, epochs=1, remainder="keep")
    assert [batch["row"].tolist() for batch in batches] == [[0, 0, 1], [2]]


def test_interleaved_source_has_info():
    fn = data.rec_data(lambda name: {"x": np.zeros((2, 5))}, interleave=True)
    source = fn(["a", "b"])
    assert source.info.shapes == {"x": (5,)}
    assert source._reader.name.startswith("in turns ")
    assert source._reader.gather(RowRequest.of_rows([3]))["x"].shape == (1, 5)


def test_feature_fn_may_return_a_pair():
    fn = data.rec_data(open_one, feature_fn=lambda example: (example["row"], {"x": 2.0}))
    gold, batch = next(fn(["a"]).batches(2))
    assert gold.tolist() == [0, 1]
    assert batch["x"].tolist() == [2, 2]


def test_cache_keeps_files_that_can_be_read_only_once():
    def once(name):
        yield from open_one(name)

    with pytest.raises(data.DataError, match="Cannot concatenate streams"):
        data.rec_data(once)(["a", "b"])
    assert len(data.rec_data(once, cache=True)(["a", "b"])) == 4


def test_rec_data_opens_patterns_by_default():
    assert len(data.rec_data()(["digits://split=test"])) == 360


def count_to(name):
    return iter(range(int(name)))


def test_tokens_are_cut_within_each_file():
    fn = data.lm_data(3, dataset_fn=count_to)
    assert [ids.tolist() for ids in fn(["7", "4"])] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_allow_remainder_keeps_a_short_sequence():
    fn = data.lm_data(3, True, count_to, feature_fn=lambda ids: (len(ids), np.resize(ids, 3)))
    assert [int(n) for n, _ in fn(["7"])] == [3, 3, 1]


def test_random_skip_differs_by_epoch_but_not_by_restart():
    batches = data.lm_data(5, dataset_fn=count_to, random_skip=True)(["52"]).batches(9, seed=3)
    starts = [next(batches)[0][0] for _ in range(8)]
    assert len(set(starts)) > 1
    again = data.lm_data(5, dataset_fn=count_to, random_skip=True)(["52"]).batches(9, seed=3)
    assert [next(again)[0][0] for _ in range(8)] == starts


def test_consecutive_batches_match_the_original():
    """The values of the original pipeline: range(20), n=3, batch size 2."""
    fn = data.lm_data(1, dataset_fn=count_to)
    batches = [batch[:, 0].tolist() for batch in fn(["20"]).batches(2, consecutive=3, epochs=1)]
    assert batches[:6] == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]


def test_bytes_are_tokens_by_default(tmp_path):
    (tmp_path / "text").write_bytes(b"abcd")
    assert [ids.tolist() for ids in data.lm_data(2)([str(tmp_path / "text")])] == [
        [97, 98],
        [99, 100],
    ]


def test_allow_remainder_and_random_skip_exclude_each_other():
    with pytest.raises(ValueError, match="allow_remainder"):
        data.lm_data(2, allow_remainder=True, random_skip=True)


def test_lines_iterator_options(tmp_path):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"a b\r\n\n\xff\nc"))
    assert list(data.lines_iterator(path)) == ["a b", "c"]
    assert list(data.lines_iterator(path, split=True)) == [["a", "b"], ["c"]]
    assert list(data.lines_iterator(path, allow_empty=True)) == ["a b", "", "c"]
