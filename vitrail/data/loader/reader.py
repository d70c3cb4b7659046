"""Read one sample of a split, by index, as pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from vitrail.config import Preprocess
from vitrail.data.decode import JPEG_DOWNSCALES, BadImage, OpenedImage, open_image
from vitrail.data.loader.cache import PixelCache
from vitrail.data.transforms import crop_resize
from vitrail.errors import error_reason

Box = tuple[int, int, int, int]  # top, left, height, width


class ImageSource(Protocol):
    """A split: name and bytes (or decoded pixels) of each image, labels and weights of many."""

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> bytes | np.ndarray: ...  # encoded, or uint8 (H, W, C)
    def labels_of(self, indices: np.ndarray) -> np.ndarray: ...  # int64 (B,), or uint8 (B, K) of 0 and 1
    def weights_of(self, indices: np.ndarray) -> np.ndarray: ...  # float32 (B,)


class Reader:
    """Decodes samples, with an optional cache.

    Without a cache, `scaled` decodes a JPEG at a smaller size if the crop is resized down a lot. That differs from the
    crop of the full image by 41 dB PSNR, as much as a shift by half a pixel.
    """

    def __init__(
        self,
        source: ImageSource,
        spec: Preprocess,
        max_pixels: int,
        cache: PixelCache | None = None,
        scaled: bool = False,
    ) -> None:
        self.source, self.spec, self.max_pixels = source, spec, max_pixels
        self.cache, self.scaled = cache, scaled and cache is None

    def image(self, index: int) -> np.ndarray:
        """The full image, read-only uint8 (H, W, C). Raises BadImage."""
        cached = self.cache.get(index) if self.cache is not None else None
        if cached is not None:
            return cached
        data = self._read(index)
        if isinstance(data, np.ndarray):
            return data
        image = self._open(data).pixels()
        if self.cache is not None:
            self.cache.put(index, image, data)
        return image

    def crop(self, index: int, choose_box: Callable[[int, int], Box]) -> Tensor:
        """Crop the box `choose_box(height, width)` returns and resize it to the input: uint8 (C, height, width)."""
        data = self._read(index) if self.scaled else None
        if not isinstance(data, bytes):
            image = self.image(index)
            return crop_resize(image, choose_box(*image.shape[:2]), self.spec)
        opened = self._open(data)
        box = choose_box(*opened.size)
        downscale = jpeg_downscale_for(box, self.spec.size) if opened.can_downscale else 1
        image = opened.pixels(downscale)
        return crop_resize(image, scale_box(box, downscale), self.spec)

    def save(self) -> None:
        """Save the cache for later runs, if it supports that."""
        if self.cache is not None:
            self.cache.save()

    def _open(self, data: bytes) -> OpenedImage:
        spec = self.spec
        return open_image(data, channels=spec.channels, background=spec.background, max_pixels=self.max_pixels)

    def _read(self, index: int) -> bytes | np.ndarray:
        try:
            return self.source.read(index)
        except OSError as error:
            raise BadImage(f"cannot be read: {error_reason(error)}") from error


def jpeg_downscale_for(box: Box, size: tuple[int, int]) -> int:
    """Largest JPEG downscale at which `box` is still at least `size`."""
    fits = (factor for factor in JPEG_DOWNSCALES if box[2] >= factor * size[0] and box[3] >= factor * size[1])
    return next(fits, 1)


def scale_box(box: Box, downscale: int) -> Box:
    """The same box in an image decoded at 1/`downscale`, rounded to pixels."""
    if downscale == 1:
        return box
    top, left = round(box[0] / downscale), round(box[1] / downscale)
    return top, left, round((box[0] + box[2]) / downscale) - top, round((box[1] + box[3]) / downscale) - left
