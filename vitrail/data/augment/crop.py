"""Random crop boxes of training images, from random numbers drawn before the image size is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from vitrail.config import AugmentConfig
from vitrail.data.randomness import Stream, uniform

Box = tuple[int, int, int, int]  # top, left, height, width
ATTEMPTS = 100  # as in TensorFlow's sample_distorted_bounding_box, which the paper's code uses
RESIZED_ATTEMPTS = 10  # as in torchvision


def crop_draws(seed: int, epochs: ArrayLike, samples: ArrayLike) -> np.ndarray:
    """Random numbers for the crops of a batch, (B, ATTEMPTS, 4)."""
    draws = uniform(seed, Stream.CROP, epochs, samples, 4 * ATTEMPTS)
    return draws.reshape(*draws.shape[:-1], ATTEMPTS, 4)


def crop_box(height: int, width: int, config: AugmentConfig, draws: np.ndarray) -> Box:
    """Crop box of one image, from its row of `crop_draws`, (ATTEMPTS, 4)."""
    if config.crop == "random_resized":
        return _random_resized(height, width, config, draws)
    if config.crop == "resmall":
        side = max(1, round(min(height, width) * config.crop_fraction))
        return _random_position(height, width, side, side, draws)
    if config.crop == "part":
        crop_h = max(1, round(height * config.crop_fraction))
        crop_w = max(1, round(width * config.crop_fraction))
        return _random_position(height, width, crop_h, crop_w, draws)
    for attempt in draws:
        box = _inception(height, width, config, attempt.tolist())
        if box is not None:
            return box
    return 0, 0, height, width


def _inception(height: int, width: int, config: AugmentConfig, draws: Sequence[float]) -> Box | None:
    """Inception crop as in the paper's code: aspect ratio uniform, then height uniform. None if it does not fit.

    Unlike torchvision's RandomResizedCrop, which samples the area uniformly and the ratio log-uniformly.
    """
    ratio = config.ratio[0] + draws[0] * (config.ratio[1] - config.ratio[0])
    smallest, largest = config.scale[0] * height * width, config.scale[1] * height * width
    low = round((smallest / ratio) ** 0.5)
    high = min(round((largest / ratio) ** 0.5), height, int((width + 0.5 - 1e-7) / ratio))
    low = min(low, high)
    crop_h = low + int(draws[1] * (high - low + 1))
    crop_w = round(crop_h * ratio)
    if crop_w * crop_h < smallest:  # rounding alone must not make an attempt fail
        crop_h, crop_w = crop_h + 1, round((crop_h + 1) * ratio)
    if crop_w * crop_h > largest:
        crop_h, crop_w = crop_h - 1, round((crop_h - 1) * ratio)
    fits = 0 < crop_h <= height and 0 < crop_w <= width and smallest <= crop_w * crop_h <= largest
    if not fits:
        return None
    # Offsets exclude the last position, as in the reference code.
    return int(draws[2] * (height - crop_h)), int(draws[3] * (width - crop_w)), crop_h, crop_w


def _random_resized(height: int, width: int, config: AugmentConfig, draws: np.ndarray) -> Box:
    """RandomResizedCrop of torchvision: area uniform, ratio log-uniform; falls back to the largest centre crop."""
    low, high = config.ratio
    for attempt in draws[:RESIZED_ATTEMPTS]:
        scale, log_ratio, down, right = attempt.tolist()
        area = height * width * (config.scale[0] + scale * (config.scale[1] - config.scale[0]))
        ratio = low * (high / low) ** log_ratio
        crop_h, crop_w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < crop_h <= height and 0 < crop_w <= width:
            return int(down * (height - crop_h + 1)), int(right * (width - crop_w + 1)), crop_h, crop_w
    crop_h = height if width / height >= low else max(1, round(width / low))
    crop_w = width if width / height <= high else max(1, round(height * high))
    return (height - crop_h) // 2, (width - crop_w) // 2, crop_h, crop_w


def _random_position(height: int, width: int, crop_h: int, crop_w: int, draws: np.ndarray) -> Box:
    down, right = draws[0, :2].tolist()
    return int(down * (height - crop_h + 1)), int(right * (width - crop_w + 1)), crop_h, crop_w
