"""How far attention reaches, in pixels (Figure 7, right, Figure 11 and appendix D.7)."""

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
    """Means over images and over the patches that look."""

    pixels: np.ndarray  # (blocks, heads): as the paper's code has it, what goes to the class token counts as distance 0
    renormalised: np.ndarray  # (blocks, heads): of what goes to patches alone
    elsewhere: np.ndarray  # (blocks, heads): the share that goes to class token and registers
    uniform: float  # what attention that is the same everywhere would have
    images: int


def grid_distances(grid: Size, cell: Size) -> np.ndarray:
    """Pixels between the centres of patches, (h*w, h*w)."""
    places = np.mgrid[: grid[0], : grid[1]].reshape(2, -1).T * np.array(cell, np.float64)
    return np.linalg.norm(places[:, None] - places[None], axis=-1)


def head_distances(attention: Tensor, apart: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For attention (B, heads, T, T) of tokens whose last N are patches, `apart` (N, N) pixels from each other: the
    mean distance of what each patch looks at, the same after the patches' shares are made to sum to one, and the share
    of other tokens; each (B, heads)."""
    first = attention.shape[-1] - len(apart)
    shares = attention[:, :, first:, first:]
    reach = (shares * apart).sum(-1)  # (B, heads, N)
    total = shares.sum(-1)
    return reach.mean(-1), (reach / total.clamp_min(1e-12)).mean(-1), 1 - total.mean(-1)


def attention_distances(
    net: VisionTransformer, batches: Iterable[Tensor], between: Callable[[int], None] | None = None
) -> AttentionDistances:
    """Measure every head over batches of normalised pixels; `between` hears how many images are done."""
    config = net.config
    distances = grid_distances(config.grid, config.cell)
    apart = torch.from_numpy(distances).float().to(net.patch_embed.proj.weight.device)
    sums = torch.zeros(3, config.blocks, config.heads, dtype=torch.float64)

    def see(index: int, attention: Tensor) -> None:
        for kind, values in enumerate(head_distances(attention.float(), apart)):
            sums[kind, index] += values.sum(0).double().cpu()

    images = 0
    for pixels in batches:
        visit_attention(net, pixels, see)
        images += len(pixels)
        if between is not None:
            between(images)
    if not images:
        raise ValueError("there are no images to measure attention on")
    plain, renormalised, elsewhere = (sums / images).numpy()
    return AttentionDistances(plain, renormalised, elsewhere.clip(0, 1), float(distances.mean()), images)
