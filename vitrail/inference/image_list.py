"""Images passed from Python: paths, bytes and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.data.decode import BadImage
from vitrail.data.files import read_file
from vitrail.errors import UserError, error_reason

IMAGE = "an image must be a path, bytes or a uint8 array"
Image = str | Path | bytes | np.ndarray  # a file, its bytes, or decoded uint8 (H, W, C)


class ImageList:
    """An image source for a `Reader`, from paths, bytes and arrays."""

    def __init__(self, images: Sequence[Image], channels: int, first: int = 0) -> None:
        """`first` is the number of the first image, for error messages."""
        for image in images:
            if isinstance(image, np.ndarray):
                _check_array(image, channels)
            elif not isinstance(image, str | Path | bytes):
                raise UserError(f"{IMAGE}, not {type(image).__name__}")
        self.images, self.first = images, first

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        image = self.images[index]
        return str(image) if isinstance(image, str | Path) else f"image {self.first + index}"

    def read(self, index: int) -> bytes | np.ndarray:
        image = self.images[index]
        try:
            return read_file(image) if isinstance(image, str | Path) else image
        except (OSError, ValueError) as error:  # ValueError: an invalid path
            raise BadImage(error_reason(error)) from None

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        return np.zeros(len(indices), np.int64)

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), np.float32)


def _check_array(image: np.ndarray, channels: int) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != channels or not image.size:
        shape = "x".join(map(str, image.shape))
        raise UserError(f"an image array must be uint8, height x width x {channels}, not {image.dtype} {shape}")
