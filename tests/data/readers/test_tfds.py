import json
import sys
import types

import numpy as np
import pytest

from tekoa import data
from tekoa.data.readers import tfds


@pytest.fixture
def prepared(tmp_path):
    """A directory that looks like a prepared dataset, without its files."""

    def make(version="1.0.0", file_format="array_record", config=""):
        folder = tmp_path / "toy" / config / version
        folder.mkdir(parents=True)
        splits = [{"name": "train"}, {"name": "test"}]
        info = {"fileFormat": file_format, "splits": splits}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("mnist/split=train", ("/default", "mnist", "train")),
        ("mnist:3.0.1/split=test", ("/default", "mnist:3.0.1", "test")),
        ("/data:mnist/split=train[:10%]", ("/data", "mnist", "train[:10%]")),
        ("/data/x:emnist/letters/split=train", ("/data/x", "emnist/letters", "train")),
        ("/a:b:mnist:3.*.*/split=a+b", ("/a:b", "mnist:3.*.*", "a+b")),
    ],
)
def test_pattern_is_split_into_directory_name_and_split(monkeypatch, rest, expected):
    monkeypatch.setenv("TFDS_DATA_DIR", "/default")
    directory, name, split = tfds.split_pattern(rest)
    assert (str(directory), name, split) == expected


def test_pattern_without_split_raises():
    with pytest.raises(data.DataError, match="must have the form tfds://NAME/split=SPLIT"):
        data.load("tfds://mnist")


def test_unprepared_dataset_raises_with_instructions(tmp_path):
    with pytest.raises(data.DataError, match=r"'toy' is not prepared in .*download_and_prepare"):
        data.load(f"tfds://{tmp_path}:toy/split=train")


def test_unknown_version_raises(prepared):
    with pytest.raises(data.DataError, match=r"'toy' version 9\.9\.9 is not prepared"):
        data.load(f"tfds://{prepared()}:toy:9.9.9/split=train")


def test_unknown_split_raises(prepared):
    with pytest.raises(data.DataError, match=r"split 'val'\. Its splits are \['train', 'test'\]"):
        data.load(f"tfds://{prepared()}:toy/split=val[:10%]")


def test_files_that_need_tensorflow_raise_with_instructions(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(data.DataError, match="has tfrecord files, which need TensorFlow"):
        data.load(f"tfds://{prepared(file_format='tfrecord')}:toy/split=train")


def test_missing_library_raises_with_install_command(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(data.DataError, match=r"pip install 'tekoa\[tfds\]'"):
        data.load(f"tfds://{prepared()}:toy/split=train")


def test_ambiguous_config_raises(prepared):
    prepared(config="letters")
    folder = prepared(config="digits")
    with pytest.raises(data.DataError, match=r"Choose one of \['toy/digits', 'toy/letters'\]"):
        data.load(f"tfds://{folder}:toy/split=train")


def test_default_config_is_the_one_that_tfds_notes(prepared, monkeypatch):
    library = types.SimpleNamespace(builder_from_directory=FakeBuilder)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", library)
    prepared(config="letters")
    folder = prepared(config="digits")
    (folder / "toy/.config").mkdir()
    (folder / "toy/.config/metadata.json").write_text('{"default_config_name": "letters"}')
    data.load(f"tfds://{folder}:toy/split=train")
    assert FakeBuilder.directory == folder / "toy/letters/1.0.0"


def test_fields_that_are_not_numbers_are_left_out_with_one_line(prepared, monkeypatch, caplog):
    library = types.SimpleNamespace(builder_from_directory=FakeBuilder)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", library)
    source = data.load(f"tfds://{prepared()}:toy/split=train")
    assert source.info.shapes == {"image": (2, 2, 1), "label": ()}
    assert source.info.n_classes == 3
    batch = next(source.batches(2))
    assert batch.keys() == {"image", "label"}
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "left out the fields that are not numbers: filename, place."
    ]


class FakeBuilder:
    """The part of a TFDS builder that is used, with the fields of EuroSAT and a nested one."""

    def __init__(self, directory):
        FakeBuilder.directory = directory
        feature = types.SimpleNamespace
        self.info = types.SimpleNamespace(
            version="1.0.0",
            features={
                "image": feature(np_dtype=np.uint8),
                "label": feature(np_dtype=np.int64, num_classes=3),
                "filename": feature(np_dtype=np.object_),
                "place": feature(np_dtype={"x": np.float32, "name": np.str_}),
            },
        )

    def as_data_source(self, split):
        image = np.zeros((2, 2, 1), np.uint8)
        place = {"x": np.float32(1), "name": "here"}
        return [
            {"image": image, "label": i, "filename": f"{i}.jpg", "place": place} for i in range(4)
        ]


@pytest.mark.slow
def test_prepared_dataset_is_read_without_tensorflow(tmp_path):
    library = pytest.importorskip("tensorflow_datasets", reason="the 'tfds' extra is not installed")

    class Toy(library.core.GeneratorBasedBuilder):
        VERSION = library.core.Version("1.0.0")

        def _info(self):
            label = library.features.ClassLabel(num_classes=3)
            features = {"x": library.features.Scalar(np.int64), "label": label}
            return library.core.DatasetInfo(
                builder=self, features=library.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(9)}

        def _generate_examples(self, n):
            for at in range(n):
                yield at, {"x": at, "label": at % 3}

    Toy(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    source = data.load(f"tfds://{tmp_path}:toy/split=train")
    assert source.info.n_classes == 3
    assert sorted(int(example["x"]) for example in source) == list(range(9))
    assert "tensorflow" not in sys.modules
