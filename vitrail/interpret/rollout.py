"""Attention rollout (Abnar and Zuidema 2020; Figures 6 and 14): what patches share in what is read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.interpret.attention import patch_map, visit_attention
from vitrail.models.vit import VisionTransformer


def rollout(net: VisionTransformer, pixels: Tensor) -> np.ndarray:
    """Maps (B, h, w) for normalised pixels: attention averaged over heads, half of each token kept for its residual,
    multiplied through all blocks. MLPs and values do not count, so a map says where information could come from, for
    no class in particular."""
    product: Tensor | None = None

    def see(_: int, attention: Tensor) -> None:
        nonlocal product
        mixing = attention.float().mean(1)
        mixing.diagonal(dim1=1, dim2=2).add_(1)
        mixing /= 2
        product = mixing if product is None else mixing @ product

    tokens = visit_attention(net, pixels, see)
    assert product is not None
    with torch.no_grad():
        return patch_map(net, product, tokens).cpu().numpy()
