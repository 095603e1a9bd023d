"""Images in folders: one file per image, and the name of its folder as its class."""

import concurrent.futures
import dataclasses
import functools
import glob
import os
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tekoa.core import files as core_files
from tekoa.core import messages
from tekoa.data.readers import files
from tekoa.data.readers.base import DataError, Info, RandomAccess, RowRequest

ENDINGS = r"\.(png|jpe?g|webp|bmp|gif|tiff?|p[bgp]m)$"

# Decoded images are kept in memory if all of them together are no larger than this.
_MAX_CACHE_BYTES = 2**30
_OPTION = re.compile(r"(.*)/(size|channels)=([^/]*)")
_USE = "Use images://DIR/size=64, size=64x48 (height and width), or channels=1 or 3."
_GREY_MODES = ("1", "L", "LA")
_MODES = (*_GREY_MODES, "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
# What Pillow raises for malformed bytes.
_MALFORMED = (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, MemoryError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    """An image and the folder that names its class; None if no folder does."""

    path: str
    folder: str | None

    @property
    def key(self) -> str:
        """A text that changes if the file is another one."""
        return f"{self.folder}/{Path(self.path).name} {os.stat(self.path).st_size}"


def has_images(directory: str) -> bool:
    """Whether there is an image anywhere below a directory."""
    return any(True for _ in _walk(directory))


def read_files(paths: Sequence[str]) -> "ImageReader":
    """Reads image files; the folder in which each one lies is its class.

    Files that all lie in the same folder have no classes.
    """
    return ImageReader(_by_parent(paths))


def read_folders(patterns: Sequence[str]) -> "ImageReader":
    """Reads the images of directories or globs such as 'photos/train/size=64'.

    The folders of a directory are its classes. Images directly in a directory have none.

    Raises:
        DataError: If there are no images, an option is wrong, or the patterns disagree.
    """
    parsed = [_parse(pattern) for pattern in patterns]
    if any(options != parsed[0][1] for _, options in parsed):
        raise DataError(f"images:// needs the same options in all of {', '.join(patterns)}.")
    images = [image for path, _ in parsed for image in _find(path)]
    return ImageReader(images, **parsed[0][1])


def _parse(pattern: str) -> tuple[str, dict[str, Any]]:
    """Separates a path from the options behind it."""
    path, options = pattern, {}
    while match := _OPTION.fullmatch(path):
        path, name, text = match.groups()
        numbers = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
        if numbers is None or (name == "channels" and text not in ("1", "3")):
            raise DataError(f"images://{pattern}: {name}={text!r} is not possible. {_USE}")
        height, width = (int(n) for n in (numbers[1], numbers[2] or numbers[1]))
        options[name] = (height, width) if name == "size" else height
    return path, options


def _find(path: str) -> list[_File]:
    path = str(core_files.local_path(path))
    if not Path(path).is_dir():
        matches = sorted(glob.glob(path, recursive=True))
        paths = [name for name in matches if re.search(ENDINGS, name, re.IGNORECASE)]
        if not paths:
            hint = f" {_USE}" if "=" in Path(path).name else ""
            raise DataError(f"images://{path}: there is no such directory or image.{hint}")
        return _by_parent(paths)
    images = [
        _File(
            path=name,
            folder=parts[0] if len(parts := Path(name).relative_to(path).parts) > 1 else None,
        )
        for name in _walk(path)
    ]
    if not images:
        raise DataError(f"images://{path}: there are no image files in this directory.")
    loose = [image.path for image in images if image.folder is None]
    if loose and len(loose) < len(images):
        raise DataError(
            f"images://{path}: the folders of this directory are classes, but {len(loose)} images "
            f"are in none of them, such as {loose[0]}. Move them into a folder, or away."
        )
    return images


def _walk(directory: str) -> Any:
    """Yields the images below a directory in order; hidden files and folders are left out."""
    for folder, names, paths in os.walk(directory, followlinks=True):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(paths):
            if re.search(ENDINGS, name, re.IGNORECASE) and not name.startswith("."):
                yield os.path.join(folder, name)


def _by_parent(paths: Sequence[str]) -> list[_File]:
    has_classes = len({Path(path).parent for path in paths}) > 1
    return [_File(path=p, folder=Path(p).parent.name if has_classes else None) for p in paths]


class ImageReader(RandomAccess):
    """Reads, resizes and stacks image files.

    Images that fit into memory together are decoded once. Those of another size than requested
    are scaled to cover it, and what stands out at the edges is cut off.

    Args:
        images: The files.
        size: Height and width; by default that of the images, which must then all have the same.
        channels: 1 for grey images, 3 for colours; by default 1 if all images are grey.
    """

    def __init__(
        self,
        images: Sequence[_File],
        *,
        size: tuple[int, int] | None = None,
        channels: int | None = None,
    ):
        self._paths = [image.path for image in images]
        if size is None or channels is None:
            size, channels = _common_form(self._paths, size, channels)
        self._shape = (*size, channels)
        classes = sorted({image.folder for image in images if image.folder is not None})
        self._labels = None
        name = f"images in {Path(os.path.commonpath(self._paths)).name}"
        facts: dict[str, Any] = {"image_shape": self._shape}
        if classes:
            folders = np.array([image.folder for image in images])
            self._labels = np.searchsorted(classes, folders).astype(np.int32)
            facts["classes"] = classes
        form = messages.array_text("uint8", self._shape)
        digest = zlib.crc32("\n".join(image.key for image in images).encode())
        of = f"{form} in {len(classes)} classes" if classes else form
        self.name = f"{name}: {len(images)} of {of}, {digest:08x}"
        shapes = {"image": self._shape, "label": ()}
        dtypes = {"image": np.dtype(np.uint8), "label": np.dtype(np.int32)}
        fields = ("image", "label") if classes else ("image",)
        self.info = Info(
            name=name,
            shapes={field: shapes[field] for field in fields},
            dtypes={field: dtypes[field] for field in fields},
            n_classes=len(classes) or None,
            value_range=(0, 255),
            facts=facts,
        )

    def __len__(self) -> int:
        return len(self._paths)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the decoded images: a worker process decodes its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}

    @functools.cached_property
    def _cache(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Space for all images, and which of them are there; None if they are too large."""
        shape = (len(self), *self._shape)
        if np.prod(shape, dtype=np.int64) > _MAX_CACHE_BYTES:
            return None
        return np.empty(shape, np.uint8), np.zeros(len(self), bool)

    def gather(self, request: RowRequest) -> Any:
        batch = {"image": self._images(request.rows)}
        if self._labels is not None:
            batch["label"] = self._labels[request.rows]
        return batch

    def _images(self, rows: np.ndarray) -> np.ndarray:
        if self._cache is None:
            return self._decode(rows)
        pixels, is_there = self._cache
        missing = np.unique(rows[~is_there[rows]])
        if len(missing):
            pixels[missing] = self._decode(missing)
            is_there[missing] = True
        return pixels[rows]

    def _decode(self, rows: np.ndarray) -> np.ndarray:
        paths = [self._paths[row] for row in rows]
        decode = functools.partial(_decode, shape=self._shape)
        if len(paths) == 1:
            return decode(paths[0])[None]
        # Pillow releases the interpreter's lock while it decodes.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return np.stack(list(pool.map(decode, paths)))


def _common_form(
    paths: Sequence[str], size: tuple[int, int] | None, channels: int | None
) -> tuple[tuple[int, int], int]:
    """Returns the size and channels of all images, from their headers."""
    forms = [_open(path, lambda image: (_upright_size(image), image.mode)) for path in paths]
    if channels is None:
        channels = 1 if all(mode in _GREY_MODES for _, mode in forms) else 3
    if size is None:
        sizes = {form[0]: path for form, path in zip(forms, paths, strict=True)}
        if len(sizes) > 1:
            (first, first_path), (last, last_path) = sorted(sizes.items())[:: len(sizes) - 1]
            raise DataError(
                f"The images have {len(sizes)} different sizes: {first_path} has {first[0]}x"
                f"{first[1]} pixels, {last_path} has {last[0]}x{last[1]}. Name one size for all of "
                "them: images://DIR/size=64, or size=64x48 (height and width)."
            )
    return size or forms[0][0], channels


def _decode(path: str, shape: tuple[int, int, int]) -> np.ndarray:
    """Returns the pixels of an image in this shape."""
    from PIL import Image, ImageOps

    height, width, channels = shape

    def read(image: Any) -> np.ndarray:
        # JPEG files are read at a fraction of their size if that is enough.
        image.draft(None, (2 * max(height, width), 2 * max(height, width)))
        upright = ImageOps.exif_transpose(image)
        if "transparency" in upright.info:
            upright = upright.convert("RGBA")
        upright = upright.convert("L" if channels == 1 else "RGB")
        if upright.size != (width, height):
            upright = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
        return np.asarray(upright, np.uint8).reshape(shape)

    return _open(path, read)


def _open(path: str, read: Callable[[Any], Any]) -> Any:
    """Opens an image file and returns `read(image)`."""
    image_lib = files.require("PIL.Image", "images", f"Reading {path}")
    malformed = (*_MALFORMED, image_lib.DecompressionBombError, struct.error, zlib.error)
    with files.open_file(path) as file:
        try:
            with image_lib.open(file) as image:
                if image.mode not in _MODES:
                    raise ValueError(
                        f"its pixels have the form {image.mode!r}, not 8 bits per channel; convert "
                        "it, or load it as an array"
                    )
                return read(image)
        except malformed as error:
            reason = str(error).replace(repr(file), "the file")
            raise DataError(f"Cannot read the image {path}: {reason}.") from None


def _upright_size(image: Any) -> tuple[int, int]:
    """Returns height and width, after the rotation that the file asks for."""
    orientation = 0x0112
    is_turned = image.getexif().get(orientation, 1) >= 5
    return image.size if is_turned else image.size[::-1]
