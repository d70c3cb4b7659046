"""Which part of a training image is cut out, drawn before its size is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from vitrail.config import AugmentConfig
from vitrail.data.randomness import Stream, uniform

Box = tuple[int, int, int, int]  # top, left, height, width
ATTEMPTS = 100  # as TensorFlow's sample_distorted_bounding_box, which the paper's code calls
RESIZED_ATTEMPTS = 10  # torchvision's


def crop_draws(seed: int, epochs: ArrayLike, samples: ArrayLike) -> np.ndarray:
    """The numbers behind the crops of a whole batch, (B, ATTEMPTS, 4): drawn before any image size is known."""
    draws = uniform(seed, Stream.CROP, epochs, samples, 4 * ATTEMPTS)
    return draws.reshape(*draws.shape[:-1], ATTEMPTS, 4)


def crop_box(height: int, width: int, config: AugmentConfig, draws: np.ndarray) -> Box:
    """The crop of one image from its row of `crop_draws`, (ATTEMPTS, 4)."""
    if config.crop == "random_resized":
        return _random_resized(height, width, config, draws)
    if config.crop == "resmall":
        side = max(1, round(min(height, width) * config.crop_fraction))
        return _anywhere(height, width, side, side, draws)
    if config.crop == "part":
        return _anywhere(
            height,
            width,
            max(1, round(height * config.crop_fraction)),
            max(1, round(width * config.crop_fraction)),
            draws,
        )
    for attempt in draws:
        box = _inception(height, width, config, attempt.tolist())
        if box is not None:
            return box
    return 0, 0, height, width


def _inception(height: int, width: int, config: AugmentConfig, draws: Sequence[float]) -> Box | None:
    """The paper's "Inception crop": aspect uniform in linear space, then height uniform; none if it does not fit.

    Sampling the height and not the area favours small crops; torchvision's RandomResizedCrop does neither.
    """
    aspect = config.ratio[0] + draws[0] * (config.ratio[1] - config.ratio[0])
    smallest, largest = config.scale[0] * height * width, config.scale[1] * height * width
    low = round((smallest / aspect) ** 0.5)
    high = min(round((largest / aspect) ** 0.5), height, int((width + 0.5 - 1e-7) / aspect))
    low = min(low, high)
    crop_h = low + int(draws[1] * (high - low + 1))
    crop_w = round(crop_h * aspect)
    if crop_w * crop_h < smallest:  # do not fail on rounding alone
        crop_h, crop_w = crop_h + 1, round((crop_h + 1) * aspect)
    if crop_w * crop_h > largest:
        crop_h, crop_w = crop_h - 1, round((crop_h - 1) * aspect)
    fits = 0 < crop_h <= height and 0 < crop_w <= width and smallest <= crop_w * crop_h <= largest
    if not fits:
        return None
    # Offsets stop one short of the far edge, as in the reference.
    return int(draws[2] * (height - crop_h)), int(draws[3] * (width - crop_w)), crop_h, crop_w


def _random_resized(height: int, width: int, config: AugmentConfig, draws: np.ndarray) -> Box:
    """torchvision's RandomResizedCrop: area uniform, aspect log-uniform; else as much of the centre as the aspect
    allows."""
    low, high = config.ratio
    for attempt in draws[:RESIZED_ATTEMPTS]:
        share, shape, down, right = attempt.tolist()
        area = height * width * (config.scale[0] + share * (config.scale[1] - config.scale[0]))
        aspect = low * (high / low) ** shape
        crop_h, crop_w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < crop_h <= height and 0 < crop_w <= width:
            return int(down * (height - crop_h + 1)), int(right * (width - crop_w + 1)), crop_h, crop_w
    crop_h = height if width / height >= low else max(1, round(width / low))
    crop_w = width if width / height <= high else max(1, round(height * high))
    return (height - crop_h) // 2, (width - crop_w) // 2, crop_h, crop_w


def _anywhere(height: int, width: int, crop_h: int, crop_w: int, draws: np.ndarray) -> Box:
    down, right = draws[0, :2].tolist()
    return int(down * (height - crop_h + 1)), int(right * (width - crop_w + 1)), crop_h, crop_w
