import json

import numpy as np
import pytest

from tekoa import data
from tekoa.data.readers import huggingface

datasets = pytest.importorskip("datasets", reason="the 'datasets' extra is not installed")


@pytest.fixture(scope="module")
def dataset():
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32"), length=2),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
            "tokens": datasets.Sequence(datasets.Value("int32")),
        }
    )
    columns = {
        "x": np.arange(20).reshape(10, 2),
        "label": np.arange(10) % 2,
        "text": [f"row {at}" for at in range(10)],
        "tokens": [list(range(1, 2 + at % 3)) for at in range(10)],
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def saved(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    datasets.disable_progress_bars()
    dataset.save_to_disk(str(folder / "one"))
    splits = datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))})
    splits.save_to_disk(str(folder / "splits"))
    return folder


def test_a_dataset_keeps_dtypes_text_and_classes(dataset):
    source = data.as_source(dataset.remove_columns("tokens"))
    assert source.info.n_classes == 2
    assert source.info.facts == {"classes": ["cat", "dog"]}
    batch = next(source.batches(4, shuffle=True, seed=1))
    assert batch["x"].dtype == np.float32
    assert batch["text"].tolist() == [f"row {int(x[0]) // 2}" for x in batch["x"]]
    assert all(type(text) is str for text in batch["text"])


def test_saved_datasets_are_patterns(saved):
    assert len(data.load(f"hf://{saved}/one")) == 10
    assert len(data.load(f"hf://{saved}/splits/split=test")) == 3
    mixed = data.load(f"mix://1*hf://{saved}/one; 1*hf://{saved}/splits/split=train")
    assert len(mixed) == 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("splits", r"use one of hf://.*/splits/split=train, hf://.*/splits/split=test"),
        ("one/split=train", "has no splits"),
        ("nothing", "is not a dataset on disk. Save it there once"),
    ],
)
def test_what_is_not_on_disk_is_named(saved, name, message):
    with pytest.raises(data.DataError, match=message):
        data.load(f"hf://{saved}/{name}")


def test_damaged_files_and_splits_as_objects_are_refused(saved, tmp_path, dataset):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(data.DataError, match="Cannot read hf://"):
        data.load(f"hf://{tmp_path}")
    with pytest.raises(data.DataError, match=r"has the splits \['train'\]"):
        data.as_source(datasets.DatasetDict({"train": dataset}))
    assert not huggingface.is_dataset({"x": np.zeros(3)})


def test_ragged_columns_are_packed_or_mapped(dataset):
    columns = dataset.select_columns(["tokens"])
    rows = data.as_source(columns).pack(4)
    assert sum(int(row["token_mask"].sum()) for row in rows) == 19
    padded = data.as_source(columns).map(lambda e: {"x": np.resize(e["tokens"], 3)})
    assert next(padded.batches(10))["x"].shape == (10, 3)
    with pytest.raises(data.DataError, match=r"'tokens' .* source.pack or source.bucket"):
        next(data.as_source(columns).batches(10))


def test_a_text_column_becomes_documents(dataset):
    rows = data.documents(dataset).pack(32)
    assert rows.info.facts["n_documents"] == 10


def test_an_iterable_dataset_resumes_by_its_own_state():
    def batches():
        rows = datasets.Dataset.from_dict({"x": np.arange(50)}).to_iterable_dataset(num_shards=3)
        return data.as_source(rows).batches(4, shuffle=8)

    reading = batches()
    rows, states = [], []
    for _ in range(30):
        states.append(json.loads(json.dumps(reading.state())))
        rows.append(next(reading)["x"].tolist())
    assert sorted(np.concatenate(rows)[:50].tolist()) == list(range(50))
    assert states[8]["anchor"]["state"] is not None
    for at in (1, 8, 13, 29):
        again = batches()
        again.restore(states[at])
        assert next(again)["x"].tolist() == rows[at]
