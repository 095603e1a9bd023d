"""What a checkpoint may carry for logs besides numbers: text, histograms, images."""

import dataclasses
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of text, such as a sample of a language model."""

    value: str


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of values.

    Attributes:
        counts: Number of values in each bin.
        edges: Limits of the bins: one more than there are counts.
    """

    counts: Sequence[float]
    edges: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Image:
    """A picture.

    Attributes:
        pixels: An array (height, width), (height, width, 1), (height, width, 3) or (height, width,
            4): bytes, or floats from 0 to 1.
    """

    pixels: Any

    @property
    def bytes(self) -> np.ndarray:
        """The pixels as bytes, with an axis of channels.

        Raises:
            ValueError: If the array is no picture.
        """
        pixels = np.asarray(self.pixels)
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
            raise ValueError(
                f"An image has the shape (height, width[, 1, 3 or 4]), got {pixels.shape}."
            )
        if pixels.dtype != np.uint8:
            pixels = np.round(np.clip(np.nan_to_num(pixels.astype(np.float64)), 0, 1) * 255)
        return pixels.astype(np.uint8)


Media = Text | Histogram | Image


def png(image: Image) -> bytes:
    """Returns an image in the format PNG.

    >>> png(Image(np.zeros((2, 3), np.uint8)))[1:4]
    b'PNG'
    """
    pixels = image.bytes
    height, width, n_channels = pixels.shape
    color = {1: 0, 3: 2, 4: 6}[n_channels]
    # Every line begins with the number of its filter: 0, none.
    lines = np.concatenate(
        [np.zeros((height, 1), np.uint8), pixels.reshape(height, width * n_channels)], axis=1
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"IDAT", zlib.compress(lines.tobytes())),
            chunk(b"IEND", b""),
        ]
    )
