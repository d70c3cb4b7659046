"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): each image is mixed with the one before it in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.data.randomness import Stream, bits, uniform
from vitrail.data.to_device import on_device


def mix(
    pixels: Tensor,
    targets: Tensor,
    weights: Tensor,
    config: AugmentConfig,
    seed: int,
    steps: Sequence[int],
    positions: np.ndarray,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix row i with row i-1 of the same step: pixels float (B, C, H, W), targets (B, K), sample weights (B,).

    The batch may hold several steps one after the other, with the same number of rows each. `positions` are the
    positions of the rows in the global batch of their step. With several ranks, each has the row before its first one
    too and drops it afterwards, so that they mix as a single process.
    Each image counts by its ratio times its weight: the new weight is the sum of both, and targets are mixed by them.
    The loss is then the weighted sum of the losses of both labels, and an image of weight 0 contributes nothing.
    """
    ratio, cut, boxes = mixing_ratios(config, seed, steps, positions, (pixels.shape[-2], pixels.shape[-1]))
    columns = np.column_stack([ratio, 1 - ratio, cut, boxes]).astype(np.float32).reshape(len(steps), -1, 7)
    ratios, other_ratios, cuts, *edges = on_device(columns, pixels.device)[..., None].unbind(
        2
    )  # each (steps, rows or 1, 1)
    pixels, targets, weights = (tensor.unflatten(0, (len(steps), -1)) for tensor in (pixels, targets, weights))
    keep, paste = ratios[..., None, None], other_ratios[..., None, None]
    if cut.any():
        inside = _inside(edges, pixels)  # (steps, rows or 1, 1, H, W)
        is_cut = cuts[..., None, None] > 0
        keep, paste = torch.where(is_cut, 1 - inside, keep), torch.where(is_cut, inside, paste)
    previous = weights.roll(1, dims=1)
    own_weight, previous_weight = ratios[..., 0] * weights, other_ratios[..., 0] * previous  # (steps, rows)
    total = own_weight + previous_weight
    part = torch.where(total > 0, own_weight / total.clamp(min=1e-30), torch.ones_like(total))[..., None]
    part = torch.where((weights == previous)[..., None], ratios, part)  # equal weights: exactly the ratios
    mixed = (
        keep * pixels + paste * pixels.roll(1, dims=1),
        part * targets + (1 - part) * targets.roll(1, dims=1),
        torch.where(weights == previous, weights, total),
    )
    pixels, targets, weights = (tensor.flatten(0, 1) for tensor in mixed)
    return pixels, targets, weights


def mixing_ratios(
    config: AugmentConfig, seed: int, steps: Sequence[int], positions: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ratio of each image in its mixture, whether it is CutMix, and the replaced box (top, bottom, left, right).

    Arrays of length B, or one value per step with mix_per="batch". Mixup as in big_vision: max(a, 1 - a) with a ~ Beta.
    CutMix as in timm: a box of area 1 - a around a random pixel, clipped at the border; the ratio is the area outside.
    """
    step = np.asarray(steps)
    per_sample = config.mix_per == "sample"
    epoch, sample = (step.repeat(len(positions) // len(step)), positions) if per_sample else (np.zeros_like(step), step)
    words = bits(seed, Stream.MIXUP, epoch, sample, 4)
    switch, down, right = uniform(seed, Stream.CUTMIX, epoch, sample, 3).T
    cut = switch < 0.5 if config.mixup and config.cutmix else np.full(len(sample), config.cutmix > 0)
    alphas = np.where(cut, config.cutmix, config.mixup)
    beta = np.array([np.random.default_rng(row).beta(a, a) for row, a in zip(words, alphas, strict=True)])
    ratio = np.where(cut, beta, np.maximum(beta, 1 - beta))
    boxes = np.zeros((len(sample), 4), dtype=np.int64)
    for axis, (length, position) in enumerate(zip(size, (down, right), strict=True)):
        side, centre = np.floor(length * np.sqrt(1 - ratio)), np.floor(position * length)
        boxes[:, 2 * axis] = np.clip(centre - side // 2, 0, length)
        boxes[:, 2 * axis + 1] = np.clip(centre + (side + 1) // 2, 0, length)
    replaced = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (size[0] * size[1])
    return np.where(cut, 1 - replaced, ratio), cut, boxes


def _inside(edges: Sequence[Tensor], like: Tensor) -> Tensor:
    """Mask of boxes, 1 inside. `edges`: top, bottom, left, right, each (steps, rows or 1, 1)."""
    rows, columns = (torch.arange(length, device=like.device) for length in like.shape[-2:])
    down = (rows >= edges[0]) & (rows < edges[1])  # (steps, rows, H)
    right = (columns >= edges[2]) & (columns < edges[3])  # (steps, rows, W)
    return (down[..., :, None] & right[..., None, :]).to(like.dtype)[:, :, None]
