"""Principal components of the filters of the patch embedding (Figure 7, left)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vitrail.models.vit import VisionTransformer

COMPONENTS = 28  # as many as the paper shows


@dataclass(frozen=True, eq=False)
class Filters:
    """Principal components of the filters of one layer."""

    components: np.ndarray  # (n, height, width, channels), unit norm, largest variance first
    explained_variance_ratio: np.ndarray  # (n,)
    layer: str  # whose filters, in words


@torch.no_grad()
def embedding_filters(net: VisionTransformer, count: int = COMPONENTS) -> Filters:
    """Principal components of the patch embedding, or of a hybrid's first convolution.

    The sign of each component is chosen so that its largest entry is positive.
    """
    stem = net.patch_embed.stem
    if stem is None:
        weight, layer = net.patch_embed.proj.weight, "the patch embedding"
    else:
        weight, layer = stem.root.standardized_weight(), "the first convolution of the stem"
    kernel = weight.permute(0, 2, 3, 1)  # (filters, height, width, C)
    rows = kernel.flatten(1).double().cpu().numpy()
    _, singular, components = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    largest = np.abs(components).argmax(1)
    components *= np.sign(components[np.arange(len(components)), largest])[:, None]
    variance = singular**2
    count = min(count, int((variance > 1e-12 * variance.sum()).sum()) or 1)  # the rest is rounding noise
    components = components[:count].reshape(count, *kernel.shape[1:])
    return Filters(components, variance[:count] / (variance.sum() or 1.0), layer)
