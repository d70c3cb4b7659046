"""Arrays -> pixels: filters as tiles, and images under maps."""

from __future__ import annotations

import numpy as np
from PIL import Image


def mosaic(tiles: np.ndarray, across: int) -> np.ndarray:
    """Tiles (n, h, w, C), each stretched to 0..255, in rows of `across` on transparent ground: RGBA uint8, enlarged."""
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


def lit(image: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """An image as bright as a map (h, w) is, as the paper draws it: what has no share is black."""
    return (rgb(image) * enlarged(shares, image.shape[:2])[..., None]).astype(np.uint8)


def enlarged(shares: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """A map (h, w) as a smooth one of (height, width) whose largest value is 1."""
    large = Image.fromarray(shares.astype(np.float32)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    light = np.asarray(large).clip(0)
    return light / (light.max() or 1)


def rgb(image: np.ndarray) -> np.ndarray:
    """Three colours of any number of channels: the first three, or grey."""
    return image[..., :3] if image.shape[-1] >= 3 else image[..., :1].repeat(3, -1)
