"""Cosine similarity of the position embeddings of patches (Figure 7, centre, and Figure 10)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vitrail.errors import UserError
from vitrail.models.vit import VisionTransformer


@torch.no_grad()
def position_similarity(net: VisionTransformer, layer: int = 0) -> np.ndarray:
    """Cosine similarity between the position embeddings of all pairs of patches, (h, w, h, w).

    `layer` selects the block in networks with one table per block. Class token and registers are excluded.
    """
    config = net.config
    if config.positions in ("none", "relative"):
        raise UserError(
            f"this network adds no position embeddings to its patches (its positions are '{config.positions}')"
        )
    module = net.pos_embed
    if isinstance(module, nn.ModuleList):
        if not -len(module) <= layer < len(module):
            raise UserError(f"there is no block {layer}; this network has blocks 0 to {len(module) - 1}")
        module = module[layer]
    device = net.patch_embed.proj.weight.device
    zeros = torch.zeros(1, config.sequence, config.width, device=device)
    rows = F.normalize(module(zeros)[0, config.prefix :].float(), dim=1)  # (h*w, D)
    return (rows @ rows.T).cpu().numpy().reshape(*config.grid, *config.grid)
