"""Random changes of a whole batch on its device: flips, distortions, erased boxes.

A sample's changes are a function of (seed, epoch, sample): what else is in the batch, and who makes it, changes nothing
in them.
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

PIXEL = 1 << 16  # a pixel in the whole numbers that places are counted in
ERASING_ATTEMPTS = 10  # timm's
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)


def augment_batch(pixels: Tensor, config: AugmentConfig, seed: int, epoch: Tensor, sample: Tensor) -> Tensor:
    """Flips and distortions of uint8 (B, C, H, W), on its device; `epoch` and `sample` are on the CPU."""
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


def _shift(pixels: Tensor, share: float, draws: np.ndarray) -> Tensor:
    """Move each image by up to `share` of its sides, (B, 2) draws for down and right; the border is mirrored."""
    for axis, draw in ((-2, draws[:, 0]), (-1, draws[:, 1])):
        length = pixels.shape[axis]
        most = min(round(share * length), length - 1)
        moves = on_device(np.floor(draw * (2 * most + 1)).astype(np.int64) - most, pixels.device)
        moved = torch.arange(length, device=pixels.device) + moves[:, None]  # (B, length)
        index = length - 1 - (length - 1 - moved.abs()).abs()
        index = index[:, None, :, None] if axis == -2 else index[:, None, None, :]
        pixels = pixels.gather(axis, index.expand(pixels.shape))
    return pixels


def _zoom(pixels: Tensor, config: AugmentConfig, draws: np.ndarray) -> Tensor:
    """Cut a part out of each image, (B, 4) draws for its area, aspect, place down and right, and magnify it again, in
    whole numbers: a CPU and a GPU agree. Sides that would be too long are cut off."""
    area = config.scale[0] + draws[:, 0] * (config.scale[1] - config.scale[0])
    low, high = config.ratio
    aspect = low * (high / low) ** draws[:, 1]  # width over height
    sides = np.minimum(np.sqrt(np.stack([area / aspect, area * aspect])), 1.0)  # (2, B), as shares of height and width
    lengths = np.array(pixels.shape[-2:])[:, None]
    firsts = draws[:, 2:].T * (1 - sides) * lengths
    drawn = on_device(np.floor(np.concatenate([firsts, sides]) * PIXEL).astype(np.int64), pixels.device)[..., None]
    for axis, first, step in ((-2, drawn[0], drawn[2]), (-1, drawn[1], drawn[3])):  # each (B, 1)
        length = pixels.shape[axis]
        middles = first + (2 * torch.arange(length, device=pixels.device) + 1) * step // 2  # of the pixels to make
        place = (middles - PIXEL // 2).clamp(0, (length - 1) * PIXEL)  # (B, length), from the middle of the first
        first_of_two, share = place // PIXEL, (place % PIXEL).to(torch.int32)
        near, far, share = (
            one[:, None, :, None] if axis == -2 else one[:, None, None, :]
            for one in (first_of_two, (first_of_two + 1).clamp(max=length - 1), share)
        )
        near, far = (pixels.gather(axis, index.expand(pixels.shape)).to(torch.int32) for index in (near, far))
        mixed = (near * (PIXEL - share)).addcmul_(far, share).add_(PIXEL // 2)
        pixels = mixed.bitwise_right_shift_(16).to(torch.uint8)
    return pixels


def _flip(pixels: Tensor, axis: int, coin: np.ndarray) -> Tensor:
    """Mirror the images whose coin, (B,), says so."""
    if pixels.device.type == "cpu":  # a choice between bytes takes a CPU ten times as long as the flips
        pixels = pixels.clone()
        for row in np.flatnonzero(coin).tolist():
            pixels[row] = pixels[row].flip(axis)
        return pixels
    mirrored = on_device(coin, pixels.device)[:, None, None, None]
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
    draws = uniform(seed, Stream.ERASE, epochs, samples, 4 + 4 * ERASING_ATTEMPTS)
    tries = draws[:, 4:].reshape(-1, ERASING_ATTEMPTS, 4)
    area = size[0] * size[1] * (ERASED_AREA[0] + tries[..., 0] * (ERASED_AREA[1] - ERASED_AREA[0]))
    aspect = ERASED_ASPECT[0] * (ERASED_ASPECT[1] / ERASED_ASPECT[0]) ** tries[..., 1]  # height over width
    height, width = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    top, left = np.floor(tries[..., 2] * (size[0] - height + 1)), np.floor(tries[..., 3] * (size[1] - width + 1))
    fits = (height < size[0]) & (width < size[1])
    boxes = np.stack([top, left, height, width], axis=-1)[np.arange(len(tries)), fits.argmax(1)]  # (B, 4)
    chosen = (draws[:, 0] < config.erasing) & fits.any(1)
    return np.where(chosen[:, None], boxes, 0).astype(np.int64)
