"""Mean attention distance in pixels (Figure 7 right, Figure 11, appendix D.7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.config import Size
from vitrail.interpret.attention import visit_attention
from vitrail.models.vit import VisionTransformer


@dataclass(frozen=True, eq=False)
class AttentionDistances:
    """Mean attention distances over images and query patches."""

    pixels: np.ndarray  # (blocks, heads): as in the paper's code, attention to the class token has distance 0
    renormalised: np.ndarray  # (blocks, heads): with attention to patches renormalised to sum to 1
    elsewhere: np.ndarray  # (blocks, heads): fraction of attention to class token and registers
    uniform: float  # distance of uniform attention
    images: int


def grid_distances(grid: Size, cell: Size) -> np.ndarray:
    """Distances in pixels between the centres of patches, (h*w, h*w)."""
    centres = np.mgrid[: grid[0], : grid[1]].reshape(2, -1).T * np.array(cell, np.float64)
    return np.linalg.norm(centres[:, None] - centres[None], axis=-1)


def head_distances(attention: Tensor, distances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean attention distance of each head, the same renormalised over patches, and the fraction to other tokens.

    `attention` is (B, heads, T, T), its last N tokens are patches; `distances` (N, N) are in pixels. Returns three
    (B, heads).
    """
    first = attention.shape[-1] - len(distances)
    weights = attention[:, :, first:, first:]
    reach = (weights * distances).sum(-1)  # (B, heads, N)
    total = weights.sum(-1)
    return reach.mean(-1), (reach / total.clamp_min(1e-12)).mean(-1), 1 - total.mean(-1)


def attention_distances(
    net: VisionTransformer, batches: Iterable[Tensor], progress: Callable[[int], None] | None = None
) -> AttentionDistances:
    """Mean attention distances of all heads over batches of normalised pixels. `progress` gets the images done."""
    config = net.config
    distances = grid_distances(config.grid, config.cell)
    pixels_apart = torch.from_numpy(distances).float().to(net.patch_embed.proj.weight.device)
    sums = torch.zeros(3, config.blocks, config.heads, dtype=torch.float64)

    def visit(index: int, attention: Tensor) -> None:
        for kind, values in enumerate(head_distances(attention.float(), pixels_apart)):
            sums[kind, index] += values.sum(0).double().cpu()

    images = 0
    for pixels in batches:
        visit_attention(net, pixels, visit)
        images += len(pixels)
        if progress is not None:
            progress(images)
    if not images:
        raise ValueError("attention distances need at least one image")
    plain, renormalised, elsewhere = (sums / images).numpy()
    return AttentionDistances(plain, renormalised, elsewhere.clip(0, 1), float(distances.mean()), images)
