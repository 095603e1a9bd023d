import io
import json
import tarfile

import numpy as np
import pytest

from tekoa import data


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.fixture
def shards(tmp_path):
    """Two shards of 5 and 7 examples, written as the webdataset package writes them."""
    at = 0
    for shard, n in enumerate((5, 7)):
        with tarfile.open(tmp_path / f"part-{shard:06d}.tar", "w") as archive:
            for _ in range(n):
                key = f"folder/{'long_' * 30}{at:04d}"
                add(archive, f"{key}.cls", str(at).encode())
                add(archive, f"{key}.txt", f"text {at}".encode())
                add(archive, f"{key}.npy", npy(np.full((2, 3), at, np.float32)))
                add(archive, f"{key}.json", json.dumps({"id": at}).encode())
                add(archive, f"{key}.raw", bytes([at]))
                at += 1
    return tmp_path


def test_files_of_a_name_are_an_example(shards):
    source = data.load(f"{shards}/part-*.tar")
    assert len(source) == 12
    example = source[7]
    assert (int(example["label"]), example["text"], int(example["id"])) == (7, "text 7", 7)
    assert example["npy"].tolist() == np.full((2, 3), 7).tolist()
    assert example["raw"] == bytes([7])


def test_shards_are_shuffled_as_a_whole_and_resume(shards):
    batches = data.load(f"{shards}/part-*.tar").batches(4, shuffle=True, seed=2)
    rows = [next(batches)["label"].tolist() for _ in range(6)]
    assert sorted(np.concatenate(rows[:3]).tolist()) == list(range(12))
    again = data.load(f"{shards}/part-*.tar").batches(4, shuffle=True, seed=2, workers=1)
    again.seek(4)
    assert next(again)["label"].tolist() == rows[4]
    again.close()


def test_images_are_decoded(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="the 'images' extra is not installed")
    pixels = np.random.default_rng(0).integers(0, 255, (4, 5, 3), np.uint8)
    grey = pixels[..., :1]
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, array in (("a.png", pixels), ("a.mask.png", grey[..., 0])):
            buffer = io.BytesIO()
            image.fromarray(array).save(buffer, "png")
            add(archive, name, buffer.getvalue())
    example = data.load(str(tmp_path / "x.tar"))[0]
    assert (example["image"] == pixels).all()
    assert (example["mask"] == grey).all()


def test_damage_is_named(shards, tmp_path):
    path = tmp_path / "part-000000.tar"
    whole = path.read_bytes()
    source = data.load(str(path))
    path.write_bytes(whole[:3000])
    with pytest.raises(data.DataError, match=r"part-000000.tar, example 4, .*ends too early"):
        source[4]
    path.write_bytes(b"no archive" * 100)
    with pytest.raises(data.DataError, match=r"part-000000.tar is not a valid uncompressed .tar"):
        data.load(str(path))
    with tarfile.open(path, "w") as archive:
        add(archive, "a.cls", b"one")
    with pytest.raises(data.DataError, match=r"example 0, .cls cannot be decoded: ValueError"):
        data.load(str(path))
    with tarfile.open(path, "w") as archive:
        add(archive, "no_ending", b"x")
    with pytest.raises(data.DataError, match="no examples in the archives"):
        data.load(str(path))
