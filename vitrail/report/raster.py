"""Raster images of filters, and of images under maps."""

from __future__ import annotations

import numpy as np
from PIL import Image


def tile_filters(tiles: np.ndarray, across: int) -> np.ndarray:
    """Arrange tiles (n, h, w, C) in rows of `across`, each scaled to 0..255 and enlarged: RGBA uint8."""
    count, height, width, channels = tiles.shape
    scale = max(1, 64 // max(height, width))
    gap = max(2, scale * max(height, width) // 10)
    high, wide = height * scale + gap, width * scale + gap
    out = np.zeros((-(-count // across) * high - gap, across * wide - gap, 4), np.uint8)
    for index, tile in enumerate(tiles):
        low, span = tile.min(), np.ptp(tile) or 1.0
        colours = (255 * (tile - low) / span).astype(np.uint8)
        colours = colours if channels == 3 else colours.mean(-1, keepdims=True).astype(np.uint8).repeat(3, -1)
        y, x = index // across * high, index % across * wide
        out[y : y + height * scale, x : x + width * scale, :3] = colours.repeat(scale, 0).repeat(scale, 1)
        out[y : y + height * scale, x : x + width * scale, 3] = 255
    return out


def dim_by_map(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Multiply an image by a map (h, w), as in the paper: where the map is 0, the result is black."""
    return (to_rgb(image) * upsample_map(values, image.shape[:2])[..., None]).astype(np.uint8)


def upsample_map(values: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Resize a map (h, w) to `size` with bilinear interpolation, and scale its maximum to 1."""
    resized = Image.fromarray(values.astype(np.float32)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    result = np.asarray(resized).clip(0)
    return result / (result.max() or 1)


def to_rgb(image: np.ndarray) -> np.ndarray:
    """Return three channels of an image with any number of channels: the first three, or grey."""
    return image[..., :3] if image.shape[-1] >= 3 else image[..., :1].repeat(3, -1)
