"""Mixup and cutmix: each image of a batch with the one before it, targets and weights alike."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.images.randomness import Stream, bits, uniform
from vitrail.images.transfer import on_device


def mix(
    pixels: Tensor,
    targets: Tensor,
    weights: Tensor,
    config: AugmentConfig,
    seed: int,
    step: int,
    positions: np.ndarray,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row i with row i-1: pixels float (B, C, H, W), targets (B, K), weights (B,).

    `positions` are the rows' places in the whole batch of the step. With the batch cut over several processes, each
    holds the row before its first one too and drops it afterwards; then all mix as one process would.
    A mixture counts for each of its images by share and weight: its weight is their sum, and its targets are mixed by
    them, so that its loss is the weighted sum of the losses of both labels. An image that counts nothing adds nothing.
    """
    share, cut, boxes = shares(config, seed, step, positions, (pixels.shape[-2], pixels.shape[-1]))
    own, other = _column(share, pixels), _column(1 - share, pixels)  # (B or 1, 1)
    keep, take = own[..., None, None], other[..., None, None]
    if cut.any():
        inside = _inside(boxes, pixels)  # (B or 1, 1, H, W)
        cuts = _column(cut, pixels)[..., None, None] > 0
        keep, take = torch.where(cuts, 1 - inside, keep), torch.where(cuts, inside, take)
    before = weights.roll(1)
    ours, theirs = own[:, 0] * weights, other[:, 0] * before  # (B,)
    both = ours + theirs
    part = torch.where(both > 0, ours / both.clamp(min=1e-30), torch.ones_like(both))[:, None]
    part = torch.where((weights == before)[:, None], own, part)  # equal weights: the shares, to the bit
    return (
        keep * pixels + take * pixels.roll(1, dims=0),
        part * targets + (1 - part) * targets.roll(1, dims=0),
        torch.where(weights == before, weights, both),
    )


def shares(
    config: AugmentConfig, seed: int, step: int, positions: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each image's share in its mixture, whether it is cut, and the box it loses (top, bottom, left, right), all of
    length B, or 1 where the batch has one.

    Mixup is big_vision's: the larger of a and 1-a, with a ~ Beta. Cutmix is timm's: a box of 1-a of the area around
    any pixel, cut off at the border, and the share is what remains of the image.
    """
    epoch, sample = (0, np.array([step])) if config.mix_per == "batch" else (step, positions)
    words = bits(seed, Stream.MIXUP, epoch, sample, 4)
    switch, down, right = uniform(seed, Stream.CUTMIX, epoch, sample, 3).T
    cut = switch < 0.5 if config.mixup and config.cutmix else np.full(len(sample), config.cutmix > 0)
    alphas = np.where(cut, config.cutmix, config.mixup)
    drawn = np.array([np.random.default_rng(row).beta(a, a) for row, a in zip(words, alphas, strict=True)])
    share = np.where(cut, drawn, np.maximum(drawn, 1 - drawn))
    boxes = np.zeros((len(sample), 4), dtype=np.int64)
    for axis, (length, place) in enumerate(zip(size, (down, right), strict=True)):
        side, centre = np.floor(length * np.sqrt(1 - share)), np.floor(place * length)
        boxes[:, 2 * axis] = np.clip(centre - side // 2, 0, length)
        boxes[:, 2 * axis + 1] = np.clip(centre + (side + 1) // 2, 0, length)
    lost = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (size[0] * size[1])
    return np.where(cut, 1 - lost, share), cut, boxes


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return on_device(values.astype(np.float32), like.device)[:, None]


def _inside(boxes: np.ndarray, like: Tensor) -> Tensor:
    """1 where a box is and 0 elsewhere."""
    edges = on_device(boxes, like.device)[:, :, None]  # (B, 4, 1)
    rows, columns = (torch.arange(length, device=like.device) for length in like.shape[-2:])
    down = (rows >= edges[:, 0]) & (rows < edges[:, 1])  # (B, H)
    right = (columns >= edges[:, 2]) & (columns < edges[:, 3])  # (B, W)
    return (down[:, :, None] & right[:, None, :]).to(like.dtype)[:, None]
