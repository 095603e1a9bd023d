import io

import numpy as np
import pytest

from tekoa.loop.media import Image, png


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 3), (3, 5, 4)])
def test_a_png_has_the_pixels(shape):
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    read = np.asarray(pillow.open(io.BytesIO(png(Image(pixels)))))
    np.testing.assert_array_equal(read, pixels.squeeze())


def test_floats_are_from_0_to_1():
    pixels = Image(np.array([[-1.0, 0.0, 0.5, 1.0, np.nan]])).bytes
    assert pixels.squeeze().tolist() == [0, 0, 128, 255, 0]


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 2, 2\)"):
        png(Image(np.zeros((2, 2, 2))))
