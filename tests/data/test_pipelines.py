import gzip

import numpy as np
import pytest

from tekoa import data
from tekoa.data.pipelines import InTurns
from tekoa.data.reader import Draw

SIZES = {"a": 3, "b": 1}


def open_one(name):
    return [{"name": name, "row": i} for i in range(SIZES[name])]


def seen(source):
    return [(str(example["name"]), int(example["row"])) for example in source]


def test_records_of_files_follow_one_another():
    fn = data.rec_data(open_one)
    assert seen(fn(["a", "b"])) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert seen(fn(["a", "b"], shard_num=2, shard_index=1)) == [("a", 1), ("b", 0)]
    assert seen(fn(["a", "b"], num_take=2)) == [("a", 0), ("a", 1)]


def test_records_of_files_come_in_turns():
    fn = data.rec_data(open_one, interleave=True)
    assert seen(fn(["a", "b"])) == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    batches = fn(["a", "b"]).batches(3, epochs=1, remainder="keep")
    assert [batch["row"].tolist() for batch in batches] == [[0, 0, 1], [2]]


def test_turns_know_their_facts():
    fn = data.rec_data(lambda name: {"x": np.zeros((2, 5))}, interleave=True)
    source = fn(["a", "b"])
    assert source.info.shapes == {"x": (5,)}
    assert isinstance(source._reader, InTurns)
    assert source._reader.gather(Draw.of_rows([3]))["x"].shape == (1, 5)


def test_features_make_a_pair_for_evaluation():
    fn = data.rec_data(open_one, feature_fn=lambda example: (example["row"], {"x": 2.0}))
    gold, batch = next(fn(["a"]).batches(2))
    assert gold.tolist() == [0, 1]
    assert batch["x"].tolist() == [2, 2]


def test_what_can_be_read_once_is_kept_on_request():
    def once(name):
        yield from open_one(name)

    with pytest.raises(data.DataError, match="cannot be joined"):
        data.rec_data(once)(["a", "b"])
    assert len(data.rec_data(once, cache=True)(["a", "b"])) == 4


def test_a_pattern_is_opened_by_default():
    assert len(data.rec_data()(["digits://split=test"])) == 360


def count_to(name):
    return iter(range(int(name)))


def test_tokens_are_cut_within_each_file():
    fn = data.lm_data(3, dataset_fn=count_to)
    assert [ids.tolist() for ids in fn(["7", "4"])] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_a_remainder_is_given_short():
    fn = data.lm_data(3, True, count_to, feature_fn=lambda ids: (len(ids), np.resize(ids, 3)))
    assert [int(n) for n, _ in fn(["7"])] == [3, 3, 1]


def test_a_skip_differs_by_epoch_and_not_by_restart():
    batches = data.lm_data(5, dataset_fn=count_to, random_skip=True)(["52"]).batches(9, seed=3)
    starts = [next(batches)[0][0] for _ in range(8)]
    assert len(set(starts)) > 1
    again = data.lm_data(5, dataset_fn=count_to, random_skip=True)(["52"]).batches(9, seed=3)
    assert [next(again)[0][0] for _ in range(8)] == starts


def test_consecutive_batches_are_those_of_the_original():
    """The very values of the original's pipeline: range(20), n=3, batch size 2."""
    fn = data.lm_data(1, dataset_fn=count_to)
    found = [batch[:, 0].tolist() for batch in fn(["20"]).batches(2, consecutive=3, epochs=1)]
    assert found[:6] == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]


def test_bytes_are_tokens_where_nothing_else_is_said(tmp_path):
    (tmp_path / "text").write_bytes(b"abcd")
    assert [ids.tolist() for ids in data.lm_data(2)([str(tmp_path / "text")])] == [
        [97, 98],
        [99, 100],
    ]


def test_a_remainder_of_what_is_skipped_makes_no_sense():
    with pytest.raises(ValueError, match="allow_remainder"):
        data.lm_data(2, allow_remainder=True, random_skip=True)


def test_lines_are_read_as_asked(tmp_path):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"a b\r\n\n\xff\nc"))
    assert list(data.lines_iterator(path)) == ["a b", "c"]
    assert list(data.lines_iterator(path, split=True)) == [["a", "b"], ["c"]]
    assert list(data.lines_iterator(path, allow_empty=True)) == ["a b", "", "c"]
