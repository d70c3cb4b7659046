"""The patterns of pixels that a network looks for first (Figure 7, left): principal components of its filters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vitrail.models.vit import VisionTransformer

COMPONENTS = 28  # that the paper shows


@dataclass(frozen=True, eq=False)
class Filters:
    components: np.ndarray  # (n, height, width, channels), each of length 1, the most important first
    share: np.ndarray  # (n,): of the variance of the filters
    of: str  # which filters these are


@torch.no_grad()
def embedding_filters(net: VisionTransformer, count: int = COMPONENTS) -> Filters:
    """Principal components of the filters that patches are projected by; those of a hybrid's first convolution, since
    its projection sees no pixels. Of each component and its negative, the one whose largest entry is positive."""
    stem = net.patch_embed.stem
    if stem is None:
        weight, of = net.patch_embed.proj.weight, "the patch embedding"
    else:
        weight, of = stem.root.standardised(), "the first convolution of the stem"
    kernel = weight.permute(0, 2, 3, 1)  # (filters, height, width, C)
    rows = kernel.flatten(1).double().cpu().numpy()
    _, size, components = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    largest = np.abs(components).argmax(1)
    components *= np.sign(components[np.arange(len(components)), largest])[:, None]
    variance = size**2
    count = min(count, int((variance > 1e-12 * variance.sum()).sum()) or 1)  # what is left is rounding
    shapes = components[:count].reshape(count, *kernel.shape[1:])
    return Filters(shapes, variance[:count] / (variance.sum() or 1.0), of)
