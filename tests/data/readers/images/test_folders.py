import pickle
import re

import numpy as np
import pytest

import tekoa
from tekoa import data

Image = pytest.importorskip("PIL.Image")


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    """Five grey images of 4x6 pixels in three classes; the value of all pixels is the number."""
    for number, name in enumerate(["dog/a", "cat/b", "cat/old/c", "owl/d", "dog/e"]):
        save(tmp_path / f"train/{name}.png", np.full((4, 6), 10 * number))
    save(tmp_path / "train/.hidden/x.png", np.zeros((9, 9)))
    (tmp_path / "train/dog/notes.txt").write_text("not an image")
    return tmp_path


def rows(source):
    return next(source.batches(len(source), epochs=1))


def test_folders_of_a_directory_are_classes(folder):
    source = data.load(folder / "train")
    assert source.info.shapes == {"image": (4, 6, 1), "label": ()}
    assert (source.info.n_classes, source.info.value_range) == (3, (0, 255))
    assert source.info.facts["classes"] == ["cat", "dog", "owl"]
    batch = rows(source)
    assert batch["image"].dtype == np.uint8
    names = np.array(["cat", "dog", "owl"])[batch["label"]]
    assert sorted(zip(batch["image"][:, 0, 0, 0].tolist(), names.tolist(), strict=True)) == [
        (0, "dog"), (10, "cat"), (20, "cat"), (30, "owl"), (40, "dog"),
    ]  # fmt: skip


def test_glob_uses_the_folder_of_each_file(folder):
    batch = rows(data.load(f"{folder}/train/*/*.png"))
    assert len(batch["label"]) == 4  # Without cat/old/c.
    assert set(batch["label"].tolist()) == {0, 1, 2}
    assert "label" not in data.load(f"{folder}/train/dog/*.png").info.shapes


def test_every_image_is_brought_to_the_requested_form(tmp_path):
    left_and_right = np.zeros((40, 80, 3))
    left_and_right[:, :40, 0] = 250
    save(tmp_path / "wide.png", left_and_right)
    save(tmp_path / "grey.jpg", np.full((30, 30), 77), quality=100)
    turned = Image.Exif()
    turned[0x0112] = 6  # To be shown turned by a quarter, clockwise.
    save(tmp_path / "turned.jpg", left_and_right, exif=turned, quality=100)
    clear = np.full((10, 10, 4), 200)
    save(tmp_path / "clear.png", clear)
    images = {
        name: image.astype(int)
        for name, image in zip(
            ["clear", "grey", "turned", "wide"],
            rows(data.load(f"images://{tmp_path}/size=8x16"))["image"],
            strict=True,
        )
    }
    assert images["wide"].shape == (8, 16, 3)
    assert (images["wide"][:, :7, 0] > 240).all()
    assert (images["wide"][:, 9:, 0] < 10).all()
    # Upright it is 80x40, red above; cut to 8x16 from the middle.
    assert (images["turned"][:3, :, 0] > 240).all()
    assert (images["turned"][5:, :, 0] < 10).all()
    assert abs(images["grey"] - 77).max() <= 1
    assert (images["clear"] == 200).all()
    grey = rows(data.load(f"images://{tmp_path}/size=8x16/channels=1"))["image"]
    assert grey.shape == (4, 8, 16, 1)


def test_labels_follow_the_classes_of_the_training_data(folder):
    save(folder / "valid/owl/a.png", np.zeros((4, 6)))
    save(folder / "valid/cat/b.png", np.zeros((4, 6)))
    valid = data.load(folder / "valid")
    assert sorted(rows(valid)["label"]) == [0, 1]
    valid = valid.with_classes(["cat", "dog", "owl"])
    assert sorted(rows(valid)["label"]) == [0, 2]
    assert valid.info.n_classes == 3
    with pytest.raises(data.DataError, match="has the classes owl, which are not among cat, dog"):
        data.load(folder / "valid").with_classes(["cat", "dog"])
    unknown = data.load(folder / "valid").with_classes(["cat", "dog"], unknown=-1)
    assert sorted(rows(unknown)["label"]) == [-1, 0]


def test_fit_and_predict_use_the_same_classes_and_size(folder):
    from flax import linen as nn

    model = nn.Sequential([lambda x: x.reshape(len(x), -1) / 255.0, nn.Dense(3)])
    save(folder / "valid/owl/a.png", np.full((4, 6), 30))
    save(folder / "new/other/a.png", np.full((4, 6), 30))
    result = tekoa.fit(
        model,
        str(folder / "train"),
        loss="cross_entropy",
        steps=2,
        batch_size=5,
        show_progress=False,
    )
    assert result.classes == ["cat", "dog", "owl"]
    predicted = result.predict(str(folder / "new"))
    probability = np.exp(predicted[0] - predicted[0].max())
    # The only image shows an owl, which is class 2 here, though the only class in its directory.
    expected = -np.log(probability[2] / probability.sum())
    assert result.evaluate(str(folder / "valid"))["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(data.DataError, match=re.escape("images://DIR/size=4x6/channels=1")):
        result.predict(f"images://{folder}/new/size=8")


def test_decoded_images_are_kept_and_not_sent_to_workers(folder):
    source = data.load(folder / "train")
    first = rows(source)
    for path in (folder / "train").rglob("*.png"):
        path.unlink()
    np.testing.assert_array_equal(rows(source)["image"], first["image"])
    with pytest.raises(data.DataError, match="No such file"):
        rows(pickle.loads(pickle.dumps(source)))


def test_mistakes_are_named(folder):
    with pytest.raises(data.DataError, match="Use images://DIR/size=64"):
        data.load(f"images://{folder}/train/sise=3")
    with pytest.raises(data.DataError, match="size='0' is not possible"):
        data.load(f"images://{folder}/train/size=0")
    save(folder / "train/owl/z.png", np.zeros((4, 7)))
    with pytest.raises(data.DataError, match=r"different sizes: .* 4x6 pixels, .*z.png has 4x7"):
        data.load(folder / "train")
    save(folder / "train/loose.png", np.zeros((4, 6)))
    with pytest.raises(data.DataError, match=r"1 images are in none of them, such as .*loose.png"):
        data.load(folder / "train")


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff\xe0junk"])
def test_damaged_files_are_named(folder, content):
    (folder / "train/cat/b.png").write_bytes(content)
    with pytest.raises(data.DataError, match=r"cat/b\.png"):
        data.load(folder / "train")


def test_image_that_ends_early_is_named(folder):
    path = folder / "train/cat/b.png"
    save(path, np.random.default_rng(0).integers(0, 256, (4, 6)))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(data.DataError, match=r"cat/b\.png"):
        rows(data.load(folder / "train"))


def test_sixteen_bits_are_refused(tmp_path):
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(data.DataError, match="not 8 bits per channel"):
        data.load(tmp_path)
