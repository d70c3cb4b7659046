"""Mixup and cutmix: each image of a batch with the one before it, targets and weights alike."""

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
    """Row i with row i-1 of the same step: pixels float (B, C, H, W), targets (B, K), weights (B,). The rows of several
    steps, as many of each, may follow one another: all together, they cost a GPU's host what one step costs.

    `positions` are the rows' places in the whole batch of their step. With the batch cut over several processes, each
    holds the row before its first one too and drops it afterwards; then all mix as one process would.
    A mixture counts for each of its images by share and weight: its weight is their sum, and its targets are mixed by
    them, so that its loss is the weighted sum of the losses of both labels. An image that counts nothing adds nothing.
    """
    share, cut, boxes = shares(config, seed, steps, positions, (pixels.shape[-2], pixels.shape[-1]))
    drawn = np.column_stack([share, 1 - share, cut, boxes]).astype(np.float32).reshape(len(steps), -1, 7)
    own, other, cuts, *edges = on_device(drawn, pixels.device)[..., None].unbind(2)  # each (steps, rows or 1, 1)
    pixels, targets, weights = (tensor.unflatten(0, (len(steps), -1)) for tensor in (pixels, targets, weights))
    keep, take = own[..., None, None], other[..., None, None]
    if cut.any():
        inside = _inside(edges, pixels)  # (steps, rows or 1, 1, H, W)
        chosen = cuts[..., None, None] > 0
        keep, take = torch.where(chosen, 1 - inside, keep), torch.where(chosen, inside, take)
    before = weights.roll(1, dims=1)
    ours, theirs = own[..., 0] * weights, other[..., 0] * before  # (steps, rows)
    both = ours + theirs
    part = torch.where(both > 0, ours / both.clamp(min=1e-30), torch.ones_like(both))[..., None]
    part = torch.where((weights == before)[..., None], own, part)  # equal weights: the shares, to the bit
    mixed = (
        keep * pixels + take * pixels.roll(1, dims=1),
        part * targets + (1 - part) * targets.roll(1, dims=1),
        torch.where(weights == before, weights, both),
    )
    pixels, targets, weights = (tensor.flatten(0, 1) for tensor in mixed)
    return pixels, targets, weights


def shares(
    config: AugmentConfig, seed: int, steps: Sequence[int], positions: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each image's share in its mixture, whether it is cut, and the box it loses (top, bottom, left, right), all of
    length B, or of the number of steps where the batch of each has one.

    Mixup is big_vision's: the larger of a and 1-a, with a ~ Beta. Cutmix is timm's: a box of 1-a of the area around
    any pixel, cut off at the border, and the share is what remains of the image.
    """
    each = np.asarray(steps)
    alone = config.mix_per == "sample"
    epoch, sample = (each.repeat(len(positions) // len(each)), positions) if alone else (np.zeros_like(each), each)
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


def _inside(edges: Sequence[Tensor], like: Tensor) -> Tensor:
    """1 where a box is and 0 elsewhere; edges are (steps, rows or 1, 1): top, bottom, left, right."""
    rows, columns = (torch.arange(length, device=like.device) for length in like.shape[-2:])
    down = (rows >= edges[0]) & (rows < edges[1])  # (steps, rows, H)
    right = (columns >= edges[2]) & (columns < edges[3])  # (steps, rows, W)
    return (down[..., :, None] & right[..., None, :]).to(like.dtype)[:, :, None]
