"""Random changes of training images: the crop per sample before resizing, everything else on the whole batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.images.randomness import Stream, bits, uniform

Box = tuple[int, int, int, int]  # top, left, height, width
ATTEMPTS = 100  # as TensorFlow's sample_distorted_bounding_box, which the paper's code calls


def inception_crop(height: int, width: int, config: AugmentConfig, seed: int, epoch: int, sample: int) -> Box:
    """The paper's "Inception crop": aspect uniform in linear space, then height uniform; the whole image if all fail.

    Sampling the height and not the area favours small crops; torchvision's RandomResizedCrop does neither.
    """
    few = 4  # most images need one or two attempts; the rare rest draws all of them
    for attempts in (few, ATTEMPTS):
        draws = uniform(seed, Stream.CROP, epoch, sample, 4 * attempts).reshape(attempts, 4)
        for row in draws[0 if attempts == few else few :]:
            box = _crop_attempt(height, width, config, row)
            if box is not None:
                return box
    return 0, 0, height, width


def _crop_attempt(height: int, width: int, config: AugmentConfig, draws: np.ndarray) -> Box | None:
    aspect = config.aspect[0] + draws[0] * (config.aspect[1] - config.aspect[0])
    smallest, largest = config.area[0] * height * width, config.area[1] * height * width
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


def flip(pixels: Tensor, seed: int, epoch: Tensor, sample: Tensor) -> Tensor:
    """Mirror half of the images, each by its own coin."""
    coin = uniform(seed, Stream.FLIP, epoch.numpy(), sample.numpy(), 1)[:, 0] < 0.5
    mirrored = torch.from_numpy(coin).to(pixels.device)[:, None, None, None]
    return torch.where(mirrored, pixels.flip(-1), pixels)


def mixup(pixels: Tensor, targets: Tensor, alpha: float, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """big_vision's mixup: one share a >= 1/2 per batch, each image mixed with the one before it."""
    words = bits(seed, Stream.MIXUP, 0, step, 4)
    share = float(np.random.default_rng(words).beta(alpha, alpha))
    share = max(share, 1 - share)
    return (
        share * pixels + (1 - share) * pixels.roll(1, dims=0),
        share * targets + (1 - share) * targets.roll(1, dims=0),
    )
