"""Does a map find what spoke for a class? Images whose answer is changed by a picture pasted into them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Size
from vitrail.explain.attention import at_rest
from vitrail.model.vit import VisionTransformer

TRIES = 8  # pairs of images tried for each that is wanted
BATCH = 32


@dataclass(frozen=True, eq=False)
class Pasted:
    """Images that differ from their backgrounds only inside a box, and are another class for the network since."""

    pixels: Tensor  # (M, C, H, W), normalised
    inside: np.ndarray  # (M, h, w) bool: the patches of the box
    classes: np.ndarray  # (M,): what the network says of them, and of the pasted picture alone
    backgrounds: np.ndarray  # (M,): what it says of the background
    tried: int  # pairs of different classes

    @property
    def chance(self) -> float:
        """How often a random patch is inside."""
        return float(self.inside.mean()) if len(self.inside) else 0.0


@torch.no_grad()
def paste(net: VisionTransformer, pixels: Tensor, wanted: int = 64, seed: int = 0) -> Pasted:
    """Shrink one image to half its sides and paste it into another that is of another class for the network, at a
    random place of the grid. Kept are those where the answer becomes that of the pasted picture: whatever spoke for it
    against the background's class is inside the box, because nothing else changed."""
    config = net.config
    box = max(1, config.grid[0] // 2), max(1, config.grid[1] // 2)
    size = box[0] * config.cell[0], box[1] * config.cell[1]
    rng = np.random.default_rng(seed)
    with at_rest(net):
        answers = np.concatenate([_answers(net, part) for part in pixels.split(BATCH)])
        kept: list[tuple[Tensor, np.ndarray, int, int]] = []
        tried = 0
        for _ in range(0, wanted * TRIES, BATCH):
            pairs = rng.integers(0, len(pixels), (BATCH, 2))
            pairs = pairs[answers[pairs[:, 0]] != answers[pairs[:, 1]]]
            if not len(pairs):
                continue
            tried += len(pairs)
            small = F.interpolate(pixels[pairs[:, 0]], size, mode="bilinear", antialias=True)
            made, inside = _composed(pixels[pairs[:, 1]], small, config.grid, config.cell, box, rng)
            said = _answers(net, made)
            for row in np.flatnonzero(said == answers[pairs[:, 0]]):
                kept.append((made[row], inside[row], answers[pairs[row, 0]], answers[pairs[row, 1]]))
            if len(kept) >= wanted:
                break
    kept = kept[:wanted]
    made = torch.stack([one[0] for one in kept]) if kept else pixels[:0]
    inside = np.array([one[1] for one in kept]).reshape(-1, *config.grid)
    return Pasted(made, inside, np.array([one[2] for one in kept], int), np.array([one[3] for one in kept], int), tried)


def pointing(maps: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For maps (M, h, w): whether the highest patch is inside the box, and the share of the map that is; (M,) each.
    A map that is the same everywhere scores what a random patch would."""
    flat, box = maps.reshape(len(maps), -1), inside.reshape(len(maps), -1)
    highest = flat == flat.max(1, keepdims=True)
    hits = (highest & box).sum(1) / highest.sum(1)
    total = flat.sum(1)
    share = np.where(total > 0, (flat * box).sum(1) / np.where(total > 0, total, 1), box.mean(1))
    return hits, share


def _answers(net: VisionTransformer, pixels: Tensor) -> np.ndarray:
    return net(pixels).argmax(1).cpu().numpy()


def _composed(
    backgrounds: Tensor, small: Tensor, grid: Size, cell: Size, box: Size, rng: np.random.Generator
) -> tuple[Tensor, np.ndarray]:
    made = backgrounds.clone()
    inside = np.zeros((len(made), *grid), bool)
    for row in range(len(made)):
        top, left = (int(rng.integers(0, whole - part + 1)) for whole, part in zip(grid, box, strict=True))
        y, x = top * cell[0], left * cell[1]
        made[row, :, y : y + small.shape[2], x : x + small.shape[3]] = small[row]
        inside[row, top : top + box[0], left : left + box[1]] = True
    return made, inside
