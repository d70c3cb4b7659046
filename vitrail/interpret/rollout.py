"""Attention rollout (Abnar and Zuidema 2020; Figures 6 and 14)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.interpret.attention import patch_map, visit_attention
from vitrail.models.vit import VisionTransformer


def rollout(net: VisionTransformer, pixels: Tensor) -> np.ndarray:
    """Attention rollout maps (B, h, w) for normalised pixels.

    Averages attention over heads, mixes it half and half with the identity (the residual), and multiplies it through
    all blocks. It ignores MLPs and values: a map shows where information can come from, not for which class.
    """
    product: Tensor | None = None

    def visit(_: int, attention: Tensor) -> None:
        nonlocal product
        mixing = attention.float().mean(1)
        mixing.diagonal(dim1=1, dim2=2).add_(1)
        mixing /= 2
        product = mixing if product is None else mixing @ product

    tokens = visit_attention(net, pixels, visit)
    assert product is not None
    with torch.no_grad():
        return patch_map(net, product, tokens).cpu().numpy()
