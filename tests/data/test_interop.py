import itertools
import json

import ml_dtypes
import numpy as np
import pytest

from tekoa import data
from tekoa.data import interop


def test_all_forms_have_the_same_examples():
    rows = [{"x": at} for at in range(5)]
    forms = [{"x": np.arange(5)}, rows, lambda: iter(rows), iter(rows), (row for row in rows)]
    for form in forms:
        assert [int(example["x"]) for example in data.as_source(form)] == list(range(5))


def test_source_is_returned_unchanged_and_patterns_are_loaded():
    source = data.as_source("digits://split=test")
    assert data.as_source(source) is source
    assert len(data.as_source(["digits://split=test"])) == 360


def test_unsupported_data_raises():
    with pytest.raises(TypeError, match="Cannot read examples from an object of type int"):
        data.as_source(3)


def test_grain_stream_resumes_by_its_own_state():
    grain = pytest.importorskip("grain", reason="the 'records' extra is not installed")
    elements = grain.MapDataset.source(list(range(30))).shuffle(seed=1).map(lambda x: {"x": x})
    dataset = elements.to_iter_dataset()
    batches = data.as_source(dataset).batches(4, shuffle=6)
    rows, states = [], []
    for _ in range(12):
        states.append(json.loads(json.dumps(batches.state())))
        rows.append(next(batches)["x"].tolist())
    assert sorted(list(itertools.chain(*rows))[:30]) == list(range(30))
    for at in (5, 9, 0):
        again = data.as_source(dataset).batches(4, shuffle=6)
        again.restore(states[at])
        assert next(again)["x"].tolist() == rows[at]


def test_ready_batches_resume_by_their_number():
    ready = [{"x": np.full(2, at)} for at in range(6)]
    batches = data.as_batches(ready)
    next(batches), next(batches)
    state = json.loads(json.dumps(batches.state()))
    again = data.as_batches(ready)
    again.restore(state)
    assert next(again)["x"].tolist() == [2, 2]
    again.restore({**state, "place": None})  # As saved before lists had their own position.
    assert next(again)["x"].tolist() == [2, 2]
    other = data.as_batches(iter(ready))
    with pytest.raises(data.ChangedDataError, match=r"'iterable list', but .* 'iterable list_it"):
        other.restore(state)
    other.restore(state, allow_changes=True)
    assert next(other)["x"].tolist() == [2, 2]


def test_ready_grain_batches_resume_by_their_state():
    grain = pytest.importorskip("grain", reason="the 'records' extra is not installed")
    dataset = grain.MapDataset.source(list(range(30))).to_iter_dataset().batch(5)
    batches = data.as_batches(dataset)
    for _ in range(3):
        next(batches)
    again = data.as_batches(dataset)
    again.restore(json.loads(json.dumps(batches.state())))
    np.testing.assert_array_equal(next(again), next(batches))


def test_grain_loader_has_a_position_that_json_can_store():
    grain = pytest.importorskip("grain.python", reason="the 'records' extra is not installed")

    def loader():
        sampler = grain.SequentialSampler(9, grain.NoSharding())
        return grain.DataLoader(data_source=range(9), sampler=sampler, worker_count=0)

    batches = data.as_batches(loader())
    for _ in range(4):
        next(batches)
    restored = data.as_batches(loader())
    restored.restore(json.loads(json.dumps(batches.state())))
    assert next(restored) == next(batches) == 4


class Counter:
    """An iterator with tekoa's names for the position, and numpy numbers in it."""

    def __init__(self):
        self.at = np.int64(0)

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return {"x": int(self.at) - 1}

    def state(self):
        return {"at": (self.at, None)}

    def restore(self, state):
        self.at = np.int64(state["at"][0])


def test_position_of_any_iterator_is_stored_and_restored():
    counter = Counter()
    next(counter), next(counter)
    state = json.loads(json.dumps(interop.position(counter)))
    restored = Counter()
    assert interop.go_to(restored, state)
    assert next(restored) == {"x": 2}


@pytest.mark.parametrize("make", [lambda: (x for x in "ab"), lambda: iter({"a": 1})])
def test_iterator_without_position_has_none(make):
    assert interop.position(make()) is None
    assert not interop.go_to(make(), {"next": 1})


def test_iterator_that_cannot_be_restored_has_no_position():
    class Reporting(Counter):
        restore = None

    assert interop.position(Reporting()) is None


def test_position_of_other_data_raises():
    batches = data.as_batches(x for x in "ab")
    with pytest.raises(data.ChangedDataError, match="cannot go to the saved position"):
        batches.restore({**batches.state(), "place": {"next": 1}})


def test_data_that_is_not_iterable_raises():
    with pytest.raises(TypeError, match="must be an iterable of batches, got int: 3"):
        next(data.as_batches(3))


def test_ready_batches_can_be_restored_backwards():
    batches = data.as_batches([{"x": at} for at in range(6)])
    start = batches.state()
    assert [next(batches)["x"] for _ in range(4)] == [0, 1, 2, 3]
    middle = batches.state()
    batches.restore(start)
    assert next(batches)["x"] == 0
    batches.restore(middle)
    assert next(batches)["x"] == 4


def test_batches_of_a_source_are_returned_unchanged():
    batches = data.as_source({"x": np.arange(5)}).batches(2)
    assert data.as_batches(batches) is batches


def test_a_position_of_another_kind_of_data_is_named():
    source = data.as_source({"x": np.arange(8)}).batches(2)
    with pytest.raises(data.ChangedDataError, match=r"of a list of batches, .* is a Source now"):
        source.restore({"next": 3})
    with pytest.raises(data.ChangedDataError, match=r"of a Source, .* is a list of batches now"):
        interop.go_to(interop.iterate([1, 2, 3]), source.state())


class Stateful:
    """An iterable that holds the position of its iterator, as torchdata's loaders do."""

    def __init__(self, n):
        self._n, self._next = n, 0

    def __iter__(self):
        start, self._next = self._next, 0
        for at in range(start, self._n):
            self._next = at + 1
            yield {"x": np.full(2, at)}
        self._next = 0

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]


def test_data_that_holds_its_position_is_resumed_by_it():
    batches = data.as_batches(Stateful(6))
    next(batches), next(batches)
    state = json.loads(json.dumps(batches.state()))
    assert state["place"] == {"next": 2}
    again = data.as_batches(Stateful(6))
    again.restore(state)
    assert [batch["x"][0] for batch in again] == [2, 3, 4, 5]
    source = data.as_source(Stateful(3)).batches(1, epochs=2)
    assert [batch["x"][0, 0] for batch in source] == [0, 1, 2, 0, 1, 2]


def test_loaders_of_torch_yield_arrays():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    rows = torch.utils.data.TensorDataset(x, y)
    source = data.as_source(rows)
    assert [batch[1].tolist() for batch in source.batches(4, epochs=1, remainder="keep")] == [
        [0, 1, 2, 3],
        [4, 5],
    ]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    batches = data.as_batches(loader)
    batch = next(batches)
    assert all(isinstance(field, np.ndarray) for field in batch)
    again = data.as_batches(loader)
    again.restore(json.loads(json.dumps(batches.state())))
    assert next(again)[1].tolist() == [2, 3]
    with pytest.raises(data.DataError, match="A DataLoader yields batches"):
        data.as_source(loader)
    of_examples = data.as_source(torch.utils.data.DataLoader(y, batch_size=None))
    assert next(of_examples.batches(3)).tolist() == [0, 1, 2]


def test_an_iterable_dataset_of_torch_with_a_length_is_a_stream():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(5))

        def __len__(self):
            return 5

    assert [batch.tolist() for batch in data.as_source(Numbers()).batches(2, epochs=1)] == [
        [0, 1],
        [2, 3],
    ]


def test_tensors_of_torch_that_numpy_does_not_have():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    examples = [torch.full((2,), 1.5 * i, dtype=torch.bfloat16) for i in range(4)]
    loader = torch.utils.data.DataLoader(examples, batch_size=2)
    for batch in (next(data.as_batches(loader)), next(data.as_source(examples).batches(2))):
        assert batch.dtype == ml_dtypes.bfloat16
        assert batch[1].tolist() == [1.5, 1.5]
    with_gradients = torch.ones(2, requires_grad=True)
    assert next(data.as_source([with_gradients] * 2).batches(2)).tolist() == [[1, 1], [1, 1]]


def test_a_shuffled_stream_of_hugging_face_is_resumed_exactly():
    datasets = pytest.importorskip("datasets", reason="the 'datasets' extra is not installed")
    rows = datasets.Dataset.from_dict({"x": list(range(100))}).to_iterable_dataset(num_shards=4)

    def batches():
        return data.as_source(rows.shuffle(seed=3, buffer_size=20)).batches(8)

    first = batches()
    for _ in range(4):
        next(first)
    state = json.loads(json.dumps(first.state()))
    resumed = batches()
    resumed.restore(state)
    for _ in range(4):
        np.testing.assert_array_equal(next(resumed)["x"], next(first)["x"])
