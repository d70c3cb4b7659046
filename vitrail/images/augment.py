"""Random changes of training images: the crop per sample before resizing, everything else on the whole batch.

A sample's changes are a function of (seed, epoch, sample): what else is in the batch, and who makes it, changes nothing
in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.images.distort import distort
from vitrail.images.policy import layers_for
from vitrail.images.randomness import Stream, bits, uniform

Box = tuple[int, int, int, int]  # top, left, height, width
ATTEMPTS = 100  # as TensorFlow's sample_distorted_bounding_box, which the paper's code calls
RESIZED_ATTEMPTS = 10  # torchvision's
SMALL_SHARE = 224 / 256  # of the short side that a "resmall" crop keeps
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)


def crop_draws(seed: int, epochs: ArrayLike, samples: ArrayLike) -> np.ndarray:
    """The numbers behind the crops of a whole batch, (B, ATTEMPTS, 4): drawn before any image size is known."""
    draws = uniform(seed, Stream.CROP, epochs, samples, 4 * ATTEMPTS)
    return draws.reshape(*draws.shape[:-1], ATTEMPTS, 4)


def crop_box(height: int, width: int, config: AugmentConfig, draws: np.ndarray) -> Box:
    """The crop of one image from its row of `crop_draws`, (ATTEMPTS, 4)."""
    if config.crop == "random_resized":
        return _random_resized(height, width, config, draws)
    if config.crop == "resmall":
        return _resmall(height, width, draws)
    for attempt in draws:
        box = _inception(height, width, config, attempt.tolist())
        if box is not None:
            return box
    return 0, 0, height, width


def _inception(height: int, width: int, config: AugmentConfig, draws: Sequence[float]) -> Box | None:
    """The paper's "Inception crop": aspect uniform in linear space, then height uniform; none if it does not fit.

    Sampling the height and not the area favours small crops; torchvision's RandomResizedCrop does neither.
    """
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


def _random_resized(height: int, width: int, config: AugmentConfig, draws: np.ndarray) -> Box:
    """torchvision's RandomResizedCrop: area uniform, aspect log-uniform; else as much of the centre as the aspect
    allows."""
    low, high = config.aspect
    for attempt in draws[:RESIZED_ATTEMPTS]:
        share, shape, down, right = attempt.tolist()
        area = height * width * (config.area[0] + share * (config.area[1] - config.area[0]))
        aspect = low * (high / low) ** shape
        crop_h, crop_w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < crop_h <= height and 0 < crop_w <= width:
            return int(down * (height - crop_h + 1)), int(right * (width - crop_w + 1)), crop_h, crop_w
    crop_h = height if width / height >= low else max(1, round(width / low))
    crop_w = width if width / height <= high else max(1, round(height * high))
    return (height - crop_h) // 2, (width - crop_w) // 2, crop_h, crop_w


def _resmall(height: int, width: int, draws: np.ndarray) -> Box:
    side = max(1, round(min(height, width) * SMALL_SHARE))
    down, right = draws[0, :2].tolist()
    return int(down * (height - side + 1)), int(right * (width - side + 1)), side, side


def augment_batch(pixels: Tensor, config: AugmentConfig, seed: int, epoch: Tensor, sample: Tensor) -> Tensor:
    """Flips and distortions of uint8 (B, C, H, W), on its device; `epoch` and `sample` are on the CPU."""
    epochs, samples = epoch.numpy(), sample.numpy()
    if config.flip:
        pixels = _flip(pixels, -1, uniform(seed, Stream.FLIP, epochs, samples, 1)[:, 0] < 0.5)
    if config.flip_vertical:
        pixels = _flip(pixels, -2, uniform(seed, Stream.FLIP_VERTICAL, epochs, samples, 1)[:, 0] < 0.5)
    layers = layers_for(config, seed, epochs, samples, (pixels.shape[-2], pixels.shape[-1]))
    return distort(pixels, layers) if layers else pixels


def _flip(pixels: Tensor, axis: int, coin: np.ndarray) -> Tensor:
    """Mirror the images whose coin, (B,), says so."""
    if pixels.device.type == "cpu":  # a choice between bytes takes a CPU ten times as long as the flips
        pixels = pixels.clone()
        for row in np.flatnonzero(coin).tolist():
            pixels[row] = pixels[row].flip(axis)
        return pixels
    mirrored = torch.from_numpy(coin).to(pixels.device, non_blocking=True)[:, None, None, None]
    return torch.where(mirrored, pixels.flip(axis), pixels)


def erase(pixels: Tensor, config: AugmentConfig, seed: int, epoch: Tensor, sample: Tensor) -> Tensor:
    """timm's random erasing, in place, of normalised float32 (B, C, H, W): a box becomes N(0, 1) noise or the mean."""
    epochs, samples = epoch.numpy(), sample.numpy()
    boxes = erased_boxes(config, seed, epochs, samples, (pixels.shape[-2], pixels.shape[-1]))
    keys = bits(seed, Stream.ERASE_NOISE, epochs, samples, 2)
    generator = torch.Generator(pixels.device)
    for row in np.flatnonzero(boxes[:, 2]).tolist():
        top, left, height, width = boxes[row].tolist()
        box = pixels[row, :, top : top + height, left : left + width]
        if config.erasing_fill == "mean":
            box.zero_()
        else:  # a generator started anew for each sample: its noise too depends on nothing else
            generator.manual_seed((int(keys[row, 0]) << 31) ^ int(keys[row, 1]))
            box.copy_(torch.empty(box.shape, device=box.device).normal_(generator=generator))
    return pixels


def erased_boxes(
    config: AugmentConfig, seed: int, epochs: np.ndarray, samples: np.ndarray, size: tuple[int, int]
) -> np.ndarray:
    """What to erase, int64 (B, 4) as top, left, height, width; all 0: nothing."""
    draws = uniform(seed, Stream.ERASE, epochs, samples, 4 + 4 * RESIZED_ATTEMPTS)
    tries = draws[:, 4:].reshape(-1, RESIZED_ATTEMPTS, 4)
    area = size[0] * size[1] * (ERASED_AREA[0] + tries[..., 0] * (ERASED_AREA[1] - ERASED_AREA[0]))
    aspect = ERASED_ASPECT[0] * (ERASED_ASPECT[1] / ERASED_ASPECT[0]) ** tries[..., 1]  # height over width
    height, width = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    top, left = np.floor(tries[..., 2] * (size[0] - height + 1)), np.floor(tries[..., 3] * (size[1] - width + 1))
    fits = (height < size[0]) & (width < size[1])
    boxes = np.stack([top, left, height, width], axis=-1)[np.arange(len(tries)), fits.argmax(1)]  # (B, 4)
    chosen = (draws[:, 0] < config.erasing) & fits.any(1)
    return np.where(chosen[:, None], boxes, 0).astype(np.int64)
