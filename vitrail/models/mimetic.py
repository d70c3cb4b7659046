"""Mimetic initialization of attention (Trockman and Kolter 2023).

In trained networks, the product of query and key weights of a head is close to a multiple of the identity, so tokens
attend to similar tokens (with sincos position embeddings: to neighbors). The product of value and output projection is
close to a negative identity. This initialization has both properties, which helps small networks on small data sets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.models.vit import Attention

# Factors of identity and noise, as in the paper: of query times key, of value times output projection
QK_IDENTITY, QK_NOISE = 0.7, 0.7
VALUE_IDENTITY, VALUE_NOISE = -0.4, 0.4


@torch.no_grad()
def mimetic_(net: nn.Module) -> None:
    """Initialize the attention layers of a network in place."""
    for module in net.modules():
        if isinstance(module, Attention):
            width, size = module.proj.in_features, module.proj.in_features // module.heads
            pairs = [_factors(width, QK_IDENTITY, QK_NOISE) for _ in range(module.heads)]
            queries = torch.cat([left[:, :size].mT for left, _ in pairs])
            keys = torch.cat([right[:size] for _, right in pairs])
            proj, values = _factors(width, VALUE_IDENTITY, VALUE_NOISE)
            module.qkv.weight.copy_(torch.cat([queries, keys, values]))
            module.proj.weight.copy_(proj)


def _factors(width: int, identity: float, noise: float) -> tuple[Tensor, Tensor]:
    """Factor `identity` * I + `noise` * random into two matrices by SVD, so that truncating them is optimal."""
    product = identity * torch.eye(width) + noise * torch.randn(width, width) / width**0.5
    left, values, right = torch.linalg.svd(product)
    root = values.sqrt()
    return left * root, root[:, None] * right
