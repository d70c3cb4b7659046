"""One sample of a split, by index, as pixels."""

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


class Source(Protocol):
    """What images must offer: the bytes and name of each (or the pixels, where they are decoded), and labels and
    weights for many at a time."""

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> bytes | np.ndarray: ...  # encoded, or uint8 (H, W, C)
    def labels_of(self, indices: np.ndarray) -> np.ndarray: ...  # int64 (B,), or uint8 (B, K) of 0 and 1
    def weights_of(self, indices: np.ndarray) -> np.ndarray: ...  # float32 (B,)


class Reader:
    """Decodes samples. Images come from the cache where there is one; else a JPEG of which a large part is wanted at
    a small size can be decoded smaller (`scaled`), which a network in training does not notice: 41 dB from the crop
    of the whole picture, as a crop half a pixel beside it is."""

    def __init__(
        self, source: Source, spec: Preprocess, max_pixels: int, cache: PixelCache | None = None, scaled: bool = False
    ) -> None:
        self.source, self.spec, self.max_pixels = source, spec, max_pixels
        self.cache, self.scaled = cache, scaled and cache is None

    def image(self, index: int) -> np.ndarray:
        """The whole picture, uint8 (H, W, C), not to be written to; raises BadImage."""
        found = self.cache.get(index) if self.cache is not None else None
        if found is not None:
            return found
        data = self._read(index)
        if isinstance(data, np.ndarray):
            return data
        image = self._open(data).pixels()
        if self.cache is not None:
            self.cache.put(index, image, data)
        return image

    def crop(self, index: int, choose: Callable[[int, int], Box]) -> Tensor:
        """The part that `choose` takes of (height, width), as the network's input: uint8 (C, height, width)."""
        data = self._read(index) if self.scaled else None
        if not isinstance(data, bytes):
            image = self.image(index)
            return crop_resize(image, choose(*image.shape[:2]), self.spec)
        opened = self._open(data)
        box = choose(*opened.size)
        shrink = jpeg_scale_for(box, self.spec.size) if opened.can_downscale else 1
        image = opened.pixels(shrink)
        return crop_resize(image, scale_box(box, shrink), self.spec)

    def save(self) -> None:
        """Let later runs have what was decoded, where they can."""
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


def jpeg_scale_for(box: Box, size: tuple[int, int]) -> int:
    """How many times smaller a picture may be decoded for `box` of it to be at least `size`."""
    fits = (shrink for shrink in JPEG_DOWNSCALES if box[2] >= shrink * size[0] and box[3] >= shrink * size[1])
    return next(fits, 1)


def scale_box(box: Box, shrink: int) -> Box:
    """The same part of a picture that was decoded smaller, to the nearest pixel."""
    if shrink == 1:
        return box
    top, left = round(box[0] / shrink), round(box[1] / shrink)
    return top, left, round((box[0] + box[2]) / shrink) - top, round((box[1] + box[3]) / shrink) - left
