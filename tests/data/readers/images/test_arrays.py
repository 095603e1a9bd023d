import gzip
import struct

import numpy as np
import pytest

from tekoa import data
from tekoa.data.readers.images import arrays


def write_idx(path, array):
    codes = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}
    content = struct.pack(">HBB", 0, codes[array.dtype.name], array.ndim)
    content += struct.pack(f">{array.ndim}I", *array.shape)
    content += array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def family(tmp_path):
    """A directory with the four files of a small data set."""
    rng = np.random.default_rng(0)
    for split, n in (("train", 12), ("t10k", 5)):
        write_idx(
            tmp_path / f"{split}-images-idx3-ubyte.gz",
            rng.integers(0, 256, (n, 4, 3), dtype=np.uint8),
        )
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", (np.arange(n) % 3).astype(np.uint8))
    return tmp_path


def test_digits_match_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    bunch = datasets.load_digits()
    train, test = (data.load(f"digits://split={split}") for split in ("train", "test"))
    rows = [source._reader.gather(_all(source)) for source in (train, test)]
    pixels = np.concatenate([batch["image"] for batch in rows])
    np.testing.assert_array_equal(pixels[..., 0], bunch.images)
    np.testing.assert_array_equal(np.concatenate([b["label"] for b in rows]), bunch.target)
    assert pixels.dtype == np.uint8
    assert (len(train), len(test)) == (1437, 360)


def test_digits_have_a_value_range():
    info = data.load("digits://split=test").info
    assert info.value_range == (0, 16)
    assert info.n_classes == 10
    assert info.shapes == {"image": (8, 8, 1), "label": ()}


def _all(source):
    from tekoa.data.readers.base import RowRequest

    return RowRequest.of_rows(range(len(source)))


def test_mnist_matches_its_documentation(mnist):
    # Counts and moments computed from the original files.
    train, test = (data.load(f"idx://{mnist}/split={split}") for split in ("train", "test"))
    assert (len(train), len(test)) == (60000, 10000)
    labels = train._reader.gather(_all(train))["label"]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(labels).tolist() == counts
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(test._reader.gather(_all(test))["label"]).tolist() == counts
    pixels = train._reader.gather(_all(train))["image"]
    assert round(pixels.mean() / 255, 4) == 0.1307
    assert round(pixels.std() / 255, 4) == 0.3081
    assert train.info.shapes == {"image": (28, 28, 1), "label": ()}


def test_idx_files_are_read_with_and_without_gzip(family):
    source = data.load(f"idx://{family}/split=train")
    assert len(source) == 12
    assert source.info.n_classes == 3
    expected = np.random.default_rng(0).integers(0, 256, (12, 4, 3), dtype=np.uint8)
    np.testing.assert_array_equal(source[7]["image"][..., 0], expected[7])
    assert source[7]["label"] == 1
    assert len(data.load(f"idx://{family}/split=test")) == 5


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32", "float64"])
def test_all_idx_types_are_read(tmp_path, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    write_idx(tmp_path / "a-idx", array)
    read = arrays.read_idx(tmp_path / "a-idx")
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG and more", "starts with the bytes 89 50 4e 47"),
        (b"\0\0\x63\3" + b"\0" * 20, "starts with the bytes 00 00 63 03"),
        (b"\0", "is not an IDX file"),
        (b"\0\0\x08\1\0\0\0\5abc", r"has 11 bytes, but its header .*needs 13"),
        (b"\0\0\x08\1\0\0\0\2abc", "has more than 10 bytes, but its header .*needs 10"),
    ],
)
def test_invalid_idx_file_raises(tmp_path, content, message):
    path = tmp_path / "bad-idx"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        arrays.read_idx(path)


def test_images_and_labels_must_agree(family):
    write_idx(family / "train-labels-idx1-ubyte", np.zeros(11, np.uint8))
    with pytest.raises(data.DataError, match=r"has 12 images, but .*has 11 labels"):
        data.load(f"idx://{family}/split=train")


def test_missing_and_ambiguous_files_are_named(family):
    (family / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(data.DataError, match=r"needs exactly one file of labels .*none matches"):
        data.load(f"idx://{family}/split=test")
    write_idx(family / "emnist-train-labels-idx1-ubyte", np.zeros(12, np.uint8))
    with pytest.raises(data.DataError, match="several match"):
        data.load(f"idx://{family}/split=train")


def test_file_beside_its_compressed_form_is_not_ambiguous(family):
    write_idx(family / "train-labels-idx1-ubyte.gz", np.zeros(12, np.uint8))
    assert data.load(f"idx://{family}/split=train")[1]["label"] == 1


@pytest.mark.parametrize("name", ["emnist-letters-train", "train"])
def test_prefixes_and_dots_in_file_names_are_accepted(tmp_path, name):
    write_idx(tmp_path / f"{name}-images.idx3-ubyte", np.zeros((2, 4, 4), np.uint8))
    write_idx(tmp_path / f"{name}-labels.idx1-ubyte", np.zeros(2, np.uint8))
    assert len(data.load(f"idx://{tmp_path}/split=train")) == 2


@pytest.mark.parametrize("scheme", ["digits://split=val", "idx://{}/split=val"])
def test_unknown_split_raises(family, scheme):
    with pytest.raises(data.DataError, match="has no split 'val'"):
        data.load(scheme.format(family))


def test_npz_keeps_names_and_types(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(6, dtype=np.int16).reshape(3, 2), label=[0, 2, 1])
    for pattern in (f"npz://{tmp_path}/a.npz", f"{tmp_path}/a.npz", f"npz://{tmp_path}/*.npz"):
        source = data.load(pattern)
        assert len(source) == 3
        assert source.info.dtypes["x"] == np.int16
        assert source.info.n_classes == 3


@pytest.mark.parametrize("content", [b"no zip", b"PK\3\4 cut off"])
def test_invalid_npz_raises(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(data.DataError, match=r"a\.npz is not a valid \.npz"):
        data.load(f"npz://{tmp_path}/a.npz")


def test_objects_in_npz_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}, 1], object))
    with pytest.raises(data.DataError, match="without object arrays"):
        data.load(f"npz://{tmp_path}/a.npz")
