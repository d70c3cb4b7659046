"""Augmentation of a whole batch on its device: shift, zoom, flips, RandAugment and other distortions, random erasing.

The augmentation of a sample is a function of (seed, epoch, sample) and does not depend on the rest of the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.data.augment.distort import distort
from vitrail.data.augment.policy import layers_for
from vitrail.data.randomness import Stream, bits, uniform
from vitrail.data.to_device import on_device

ONE_PIXEL = 1 << 16  # one pixel in fixed-point coordinates
ERASING_ATTEMPTS = 10  # as in timm
ERASING_SCALE = (0.02, 1 / 3)
ERASING_RATIO = (0.3, 1 / 0.3)


def augment_batch(pixels: Tensor, config: AugmentConfig, seed: int, epoch: Tensor, sample: Tensor) -> Tensor:
    """Augment uint8 (B, C, H, W) on its device. `epoch` and `sample` are on the CPU."""
    epochs, samples = epoch.numpy(), sample.numpy()
    if config.crop == "shift":
        pixels = _shift(pixels, config.shift, uniform(seed, Stream.CROP, epochs, samples, 2))
    if config.crop == "zoom":
        pixels = _zoom(pixels, config, uniform(seed, Stream.CROP, epochs, samples, 4))
    if config.flip:
        pixels = _flip(pixels, -1, uniform(seed, Stream.FLIP, epochs, samples, 1)[:, 0] < 0.5)
    if config.flip_vertical:
        pixels = _flip(pixels, -2, uniform(seed, Stream.FLIP_VERTICAL, epochs, samples, 1)[:, 0] < 0.5)
    layers = layers_for(config, seed, epochs, samples, (pixels.shape[-2], pixels.shape[-1]))
    return distort(pixels, layers) if layers else pixels


def _shift(pixels: Tensor, fraction: float, draws: np.ndarray) -> Tensor:
    """Shift each image by up to `fraction` of its sides, with reflection at the border. (B, 2) draws: down, right."""
    for axis, draw in ((-2, draws[:, 0]), (-1, draws[:, 1])):
        length = pixels.shape[axis]
        max_shift = min(round(fraction * length), length - 1)
        shifts = on_device(np.floor(draw * (2 * max_shift + 1)).astype(np.int64) - max_shift, pixels.device)
        shifted = torch.arange(length, device=pixels.device) + shifts[:, None]  # (B, length)
        index = length - 1 - (length - 1 - shifted.abs()).abs()
        index = index[:, None, :, None] if axis == -2 else index[:, None, None, :]
        pixels = pixels.gather(axis, index.expand(pixels.shape))
    return pixels


def _zoom(pixels: Tensor, config: AugmentConfig, draws: np.ndarray) -> Tensor:
    """Random resized crop on the device, bilinear. (B, 4) draws: scale, ratio, top, left.

    Sides are clipped at the image. Integer arithmetic, so that CPU and GPU agree.
    """
    area = config.scale[0] + draws[:, 0] * (config.scale[1] - config.scale[0])
    low, high = config.ratio
    ratio = low * (high / low) ** draws[:, 1]  # width over height
    sides = np.minimum(np.sqrt(np.stack([area / ratio, area * ratio])), 1.0)  # (2, B), fractions of height and width
    lengths = np.array(pixels.shape[-2:])[:, None]
    starts = draws[:, 2:].T * (1 - sides) * lengths
    boxes = on_device(np.floor(np.concatenate([starts, sides]) * ONE_PIXEL).astype(np.int64), pixels.device)[..., None]
    for axis, start, step in ((-2, boxes[0], boxes[2]), (-1, boxes[1], boxes[3])):  # each (B, 1)
        length = pixels.shape[axis]
        centres = start + (2 * torch.arange(length, device=pixels.device) + 1) * step // 2  # of the output pixels
        # Distance from the centre of pixel 0, (B, length)
        position = (centres - ONE_PIXEL // 2).clamp(0, (length - 1) * ONE_PIXEL)
        left, weight = position // ONE_PIXEL, (position % ONE_PIXEL).to(torch.int32)
        near, far, weight = (
            values[:, None, :, None] if axis == -2 else values[:, None, None, :]
            for values in (left, (left + 1).clamp(max=length - 1), weight)
        )
        near, far = (pixels.gather(axis, index.expand(pixels.shape)).to(torch.int32) for index in (near, far))
        mixed = (near * (ONE_PIXEL - weight)).addcmul_(far, weight).add_(ONE_PIXEL // 2)
        pixels = mixed.bitwise_right_shift_(16).to(torch.uint8)
    return pixels


def _flip(pixels: Tensor, axis: int, flipped: np.ndarray) -> Tensor:
    """Flip the images where `flipped`, (B,), is true."""
    if pixels.device.type == "cpu":  # torch.where on uint8 is ten times slower than flips on a CPU
        pixels = pixels.clone()
        for row in np.flatnonzero(flipped).tolist():
            pixels[row] = pixels[row].flip(axis)
        return pixels
    mask = on_device(flipped, pixels.device)[:, None, None, None]
    return torch.where(mask, pixels.flip(axis), pixels)


def erase(pixels: Tensor, config: AugmentConfig, seed: int, epoch: Tensor, sample: Tensor) -> Tensor:
    """Random erasing as in timm, in place, of normalised float32 (B, C, H, W): N(0, 1) noise or the mean."""
    epochs, samples = epoch.numpy(), sample.numpy()
    boxes = erased_boxes(config, seed, epochs, samples, (pixels.shape[-2], pixels.shape[-1]))
    keys = bits(seed, Stream.ERASE_NOISE, epochs, samples, 2)
    generator = torch.Generator(pixels.device)
    for row in np.flatnonzero(boxes[:, 2]).tolist():
        top, left, height, width = boxes[row].tolist()
        box = pixels[row, :, top : top + height, left : left + width]
        if config.erasing_fill == "mean":
            box.zero_()
        else:  # seed per sample, so that the noise does not depend on the rest of the batch
            generator.manual_seed((int(keys[row, 0]) << 31) ^ int(keys[row, 1]))
            box.copy_(torch.empty(box.shape, device=box.device).normal_(generator=generator))
    return pixels


def erased_boxes(
    config: AugmentConfig, seed: int, epochs: np.ndarray, samples: np.ndarray, size: tuple[int, int]
) -> np.ndarray:
    """Boxes to erase, int64 (B, 4): top, left, height, width. All zeros: nothing."""
    draws = uniform(seed, Stream.ERASE, epochs, samples, 4 + 4 * ERASING_ATTEMPTS)
    attempts = draws[:, 4:].reshape(-1, ERASING_ATTEMPTS, 4)
    area = size[0] * size[1] * (ERASING_SCALE[0] + attempts[..., 0] * (ERASING_SCALE[1] - ERASING_SCALE[0]))
    ratio = ERASING_RATIO[0] * (ERASING_RATIO[1] / ERASING_RATIO[0]) ** attempts[..., 1]  # height over width
    height, width = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    top, left = np.floor(attempts[..., 2] * (size[0] - height + 1)), np.floor(attempts[..., 3] * (size[1] - width + 1))
    fits = (height < size[0]) & (width < size[1])
    boxes = np.stack([top, left, height, width], axis=-1)[np.arange(len(attempts)), fits.argmax(1)]  # (B, 4)
    chosen = (draws[:, 0] < config.erasing) & fits.any(1)
    return np.where(chosen[:, None], boxes, 0).astype(np.int64)
